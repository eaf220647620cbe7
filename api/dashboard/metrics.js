// Reading the Prometheus text of GET /metrics.

/** Returns the samples of a scrape by name: `Map(name -> [{labels, value}])`. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const [, name, inside = "", value] = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (!name) continue;
    const labels = {};
    for (const [, key, text] of inside.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = text.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(value.replace("+Inf", "Infinity")) });
  }
  return samples;
}

/** Returns the sum of the samples whose labels match; null if there is none. */
export function sumOf(samples, name, wanted = {}) {
  const found = (samples.get(name) ?? []).filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value));
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** Returns a quantile of a histogram, interpolated as Prometheus does; null without observations. */
export function quantile(samples, name, part) {
  const buckets = (samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [Number(labels.le.replace("+Inf", "Infinity")), value]);
  buckets.sort((a, b) => a[0] - b[0]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [below, before] = [0, 0];
  for (const [edge, count] of buckets) {
    if (count >= part * total) {
      if (edge === Infinity) return below;
      return below + ((edge - below) * (part * total - before)) / Math.max(1e-12, count - before);
    }
    [below, before] = [edge, count];
  }
  return below;
}
