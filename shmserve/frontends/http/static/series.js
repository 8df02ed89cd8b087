// The series that are shown, kept here: the server is asked for what is new, and answers with
// points from number `first` on. What is held from there on is replaced.

export class Series {
  constructor() {
    this.reset();
  }

  reset() {
    this.life = "";
    this.level = "";
    this.first = 0; // number of the first point held
    this.until = 0; // number of the period that runs; points before it are final
    this.tracks = new Map(); // key -> {column: values}
    this.times = [];
  }

  /** The query for what is missing. */
  query(level) {
    const parameters = new URLSearchParams({ level });
    if (this.life && level === this.level) {
      parameters.set("since", this.until);
      parameters.set("life", this.life);
    }
    return parameters.toString();
  }

  /** Take an answer in. */
  add(data) {
    if (data.life !== this.life || data.level !== this.level) this.reset();
    if (!this.life) this.first = data.first;
    const held = Math.max(0, data.first - this.first);
    const tracks = new Map();
    for (const [key, columns] of incoming(data)) {
      const old = this.tracks.get(key) ?? {};
      const merged = {};
      for (const [name, values] of Object.entries(columns)) {
        const before = (old[name] ?? []).slice(0, held);
        while (before.length < held) before.unshift(null);
        merged[name] = before.concat(values);
      }
      tracks.set(key, merged);
    }
    const surplus = Math.max(0, data.until - data.points - this.first);
    if (surplus) {
      for (const columns of tracks.values()) {
        for (const name of Object.keys(columns)) columns[name] = columns[name].slice(surplus);
      }
    }
    Object.assign(this, { life: data.life, level: data.level, until: data.until, tracks });
    this.first += surplus;
    this.times = [];
    for (let n = this.first; n < data.until + (data.running ? 1 : 0); n += 1) {
      this.times.push(data.ended_at - (data.until - n - 1) * data.seconds);
    }
  }

  column(key, name) {
    return this.tracks.get(key)?.[name] ?? this.times.map(() => null);
  }

  /** The newest value of a column. */
  last(key, name) {
    return this.column(key, name).at(-1) ?? null;
  }

  /** The mean of the newest `points` values of a column; `weights`: a weight for each point. */
  mean(key, name, points, weights = this.times.map(() => 1)) {
    const values = this.column(key, name).slice(-points);
    const heavy = weights.slice(-points).map((weight, at) => (values[at] === null ? 0 : weight));
    const all = heavy.reduce((total, weight) => total + weight, 0);
    return all ? values.reduce((total, value, at) => total + value * heavy[at], 0) / all : null;
  }

  sum(key, name, points = Infinity) {
    return this.column(key, name).slice(-points).reduce((total, value) => total + (value ?? 0), 0);
  }
}

export const modelKey = (model) => JSON.stringify(["model", model.name, model.version]);
export const gpuKey = (gpu) => JSON.stringify(["gpu", gpu.index, gpu.uuid]);
export const valueKey = (value) => JSON.stringify(["value", value.model, value.version, value.name, value.kind]);

function* incoming(data) {
  yield ["total", data.total];
  yield ["system", data.system];
  for (const model of data.models) yield [modelKey(model), model.series];
  for (const gpu of data.gpus) yield [gpuKey(gpu), gpu.series];
  for (const value of data.values) yield [valueKey(value), value.series];
}
