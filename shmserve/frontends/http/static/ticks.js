// Where an axis has its marks.

const DAY = 86400;
const TIMES = [1, 5, 10, 20, 60, 300, 600, 1200, 3600, 10800, 21600, DAY, 5 * DAY, 10 * DAY];

/** The smallest of these factors times a power of ten that is not below `least`. */
export function decimal(least, factors = [1, 2, 2.5, 5]) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * (factors.find((factor) => factor * power >= least) ?? 10);
}

/** The same for numbers of things, which have no halves. */
export const whole = (least) => Math.max(1, decimal(least, [1, 2, 5]));

/** The same for bytes, whose units are powers of two. */
export const binary = (least) => Math.max(1, 2 ** Math.ceil(Math.log2(least)));

/** Multiples of a step from `low` to `high`; `step` turns the least distance into a round one. */
export function marks(low, high, least, step) {
  const size = step(least);
  const found = [];
  for (let n = Math.ceil(low / size); n * size <= high; n += 1) {
    found.push(Number((n * size).toPrecision(12))); // 0.3, not 0.30000000000000004
  }
  return found;
}

/** Moments (seconds since 1970) that are round on the clock of who looks. */
export function moments(low, high, least) {
  const offset = -60 * new Date(low * 1000).getTimezoneOffset();
  const step = () => TIMES.find((time) => time >= least) ?? TIMES.at(-1);
  return marks(low + offset, high + offset, least, step).map((time) => time - offset);
}
