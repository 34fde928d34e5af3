// Numbers and times as people read them.

/** Three significant digits with k, M or G. */
export function compact(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= 0.9995 * unit) return `${Number((value / unit).toPrecision(3))}${suffix}`;
  }
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)}%`;
}

/** Seconds as `0.12 s`, `2 min 05 s` or `3 h 07 min`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  const two = (number) => String(number).padStart(2, "0");
  return minutes < 60 ? `${minutes} min ${two(Math.round(seconds) % 60)} s`
    : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

/** The time of day of Unix seconds, with the date if that is not today. */
export function clock(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const at = new Date(1000 * seconds);
  if (Number.isNaN(at.getTime())) return "";
  const time = at.toTimeString().slice(0, 8);
  const date = `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")}`;
  return at.toDateString() === new Date().toDateString() ? time : `${date} ${time}`;
}
