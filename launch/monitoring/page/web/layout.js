// Charts of several runs as one list.

/** The charts of all lists, in the order of the first; curves of one title are joined by their labels. */
export function merged(lists) {
  const charts = new Map();
  for (const chart of lists.flat()) {
    const key = `${chart.group}/${chart.title}`;
    const before = charts.get(key);
    if (!before) {
      charts.set(key, { ...chart, series: [...chart.series] });
      continue;
    }
    const labels = new Set(before.series.map((series) => series.label));
    before.series.push(...chart.series.filter((series) => !labels.has(series.label)));
  }
  return [...charts.values()];
}
