// Numbers, sizes and times as people read them. "–" stands for: there was none.

export const NONE = "–";
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Whole numbers as they are, others with about three digits. */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value)) return grouped.format(value);
  if (size >= 100) return grouped.format(value);
  if (size >= 10) return value.toFixed(1);
  return size >= 1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

/** A whole number with its thousands apart. */
export function count(value) {
  return value === null || value === undefined ? NONE : grouped.format(value);
}

/** Bytes with a binary unit. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${number(value)} ${units[at]}`;
}

/** Milliseconds, or seconds where there are many. */
export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 10000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${number(value)} %`;
}

export function degrees(value) {
  return value === null || value === undefined ? NONE : `${number(value)} °C`;
}

export function watts(value) {
  return value === null || value === undefined ? NONE : `${number(value)} W`;
}

/** A value at an axis, as `show` has it but without zeros at its end, and shorter if it is large. */
export function mark(value, show) {
  if (value === 0) return "0";
  if (show === number && Math.abs(value) >= 1e6) return short.format(value);
  return show(value).replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

/** How long something has lasted, in its two largest units. */
export function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  let left = Math.max(0, Math.floor(seconds));
  const found = [];
  for (const [size, unit] of parts) {
    if (left >= size || (size === 1 && !found.length)) found.push(`${Math.floor(left / size)} ${unit}`);
    left %= size;
    if (found.length === 2) break;
  }
  return found.join(" ");
}

const clocks = {
  second: new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" }),
  minute: new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" }),
  hour: new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" }),
  day: new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" }),
};

/** A moment as an axis of this level shows it. */
export function moment(seconds, level) {
  return clocks[level].format(seconds * 1000);
}
