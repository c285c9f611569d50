"use strict";
// Numbers, words and places; nothing of the browser.

const GUTTER = 168;  // width of the column with the ranks
const AXIS = 40;
const MOST_ARROWS = 3000;
const MOST_LANES = 8;  // of waits at once
const LANE = 4;  // from one to the next
const PHASES = "FBW";

// Fields of the entries of `data`.
const RUN = {phase: 2, mb: 3, name: 4, task: 5, step: 6};
const WAIT = {phase: 2, mb: 3, name: 4, what: 5, peer: 6};
const COPY = {what: 2, peer: 3, bytes: 4, isSent: 5};
const IDLE = {what: 2, peer: 3, task: 4};
const PLAN = {phase: 2, mb: 3};
const SENT = {source: 0, target: 1, from: 2, to: 3, bytes: 4, mb: 5, what: 6};

function formatTime(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return (us / 1e6).toFixed(3) + " s";
  if (size >= 1e3) return (us / 1e3).toFixed(size >= 1e5 ? 1 : 3) + " ms";
  return us.toFixed(1) + " µs";
}

function formatBytes(bytes) {
  const units = ["bytes", "kB", "MB", "GB"];
  let i = 0;
  while (bytes >= 1000 && i < 3) {
    bytes /= 1000;
    ++i;
  }
  return bytes.toFixed(i && bytes < 100 ? 1 : 0) + " " + units[i];
}

function formatPart(part) {
  return part === null || part === undefined ? "–" : (100 * part).toFixed(1) + " %";
}

// Round times, at least 90 pixels apart.
function ticks(begin, end, width) {
  const least = (end - begin) * 90 / width;
  const power = 10 ** Math.floor(Math.log10(least));
  const distance = [1, 2, 5, 10].map((m) => m * power).find((d) => d >= least);
  const values = [];
  for (let i = Math.ceil(begin / distance); i * distance <= end; ++i) values.push(i * distance);
  return {distance, values};
}

// Index of the first entry that ends after `time`; entries do not overlap.
function firstAfter(entries, time) {
  let low = 0;
  let high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (entries[middle][0] + entries[middle][1] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Spreads entries over lanes in which they do not overlap; what finds no place
// joins the lane that is free first.
function toLanes(entries, most) {
  const lanes = [];
  const ends = [];
  for (const entry of entries) {
    let lane = ends.findIndex((end) => end <= entry[0]);
    if (lane < 0 && lanes.length < most) lane = lanes.push([]) - 1;
    if (lane < 0) lane = ends.indexOf(Math.min(...ends));
    lanes[lane].push(entry);
    ends[lane] = Math.max(ends[lane] || 0, entry[0] + entry[1]);
  }
  return lanes;
}

// From top to bottom: a heading per replica if there are several; per rank the
// plan, what was executed, what the device did, copies of lanes, and the waits.
function layout(data, shown) {
  const places = [];
  let y = 0;
  let replica = -1;
  for (const row of data.rows) {
    const place = {heading: null};
    if (data.replicas > 1 && row.replica !== replica) {
      place.heading = y;
      y += 22;
    }
    replica = row.replica;
    place.top = y;
    y += 7;
    place.plan = {y, height: shown.plan ? 13 : 0};
    y += shown.plan ? 16 : 0;
    place.run = {y, height: 32};
    y += 34;
    place.device = {y, height: row.device.length ? 14 : 0};
    y += row.device.length ? 16 : 0;
    place.copies = (shown.copies ? row.copies.slice(0, MOST_LANES) : []).map(
      (entries, i) => ({y: y + LANE * i, height: 3, entries}));
    y += place.copies.length ? LANE * place.copies.length + 2 : 0;
    place.lanes = shown.waits ? toLanes(row.waits, MOST_LANES) : [];
    place.waits = {y, height: 3};
    y += LANE * place.lanes.length + 9;
    y = Math.max(y, place.top + 62);
    place.bottom = y;
    places.push(place);
  }
  return {places, height: y};
}

function hue(mb) {
  return (250 + mb * 137.508) % 360;
}

function colour(theme, phase, mb) {
  const lightness = [theme.forward, theme.backward, theme.weight][phase];
  return `oklch(${lightness} ${theme.chroma} ${hue(mb).toFixed(1)})`;
}

// The end of the name of a module says more than its begin.
function shorten(name, most) {
  if (name.length <= most) return name;
  if (most < 4) return "";
  if (!name.includes(".")) return name.slice(0, most - 1) + "…";
  const tail = name.slice(name.length - most + 1);
  const dot = tail.indexOf(".");
  return "…" + (dot > 0 && dot < tail.length - 2 ? tail.slice(dot) : tail);
}

// What a rank did in one step, or in all of them (null).
function figures(data, index, step) {
  const row = data.rows[index];
  const own = row.bySteps.filter((s) => step === null || s.number === step);
  const spans = data.steps.filter(
    (s) => s.replica === row.replica && (step === null || s.number === step));
  const inside = (t) => step === null || spans.some((s) => t >= s.begin && t <= s.end);
  const makespan = spans.reduce((sum, s) => sum + s.makespan, 0);
  const planned = spans.reduce((sum, s) => sum + (s.planned || 0), 0);
  const hasPlan = own.length > 0 && own.every((s) => s.planned !== null);
  const free = own.reduce((sum, s, i) => sum + (s.planned || 0) * (spans[i].planned || 0), 0);
  const reasons = new Map();
  for (const idle of row.idles) {
    if (!inside(idle[0])) continue;
    const words = awaited(data, idle[IDLE.what], idle[IDLE.peer]);
    reasons.set(words, (reasons.get(words) || 0) + idle[1]);
  }
  return {
    tasks: row.runs.filter((r) => inside(r[0])).length,
    copied: row.copies.flat().filter((c) => c[COPY.isSent] && inside(c[0]))
      .reduce((sum, c) => sum + c[COPY.bytes], 0),
    busy: own.reduce((sum, s) => sum + s.busy, 0),
    bubble: step === null ? row.bubble : own.length ? own[0].bubble : null,
    planned: hasPlan && planned > 0 ? free / planned : hasPlan ? 0 : null,
    makespan,
    sent: data.transfers.filter((t) => t[SENT.source] === index && inside(t[SENT.from]))
      .reduce((sum, t) => sum + t[SENT.bytes], 0),
    reasons: [...reasons].filter(([, time]) => time > makespan / 1000)
      .sort((a, b) => b[1] - a[1]).slice(0, 3),
  };
}

function awaited(data, what, peer) {
  return data.words[what] + (peer >= 0 ? ` of rank ${peer}` : "");
}

function describeRun(data, row, run) {
  return [
    `${PHASES[run[RUN.phase]]}${run[RUN.mb]} ${data.words[run[RUN.name]]}`,
    `${["forward", "backward", "weight gradients"][run[RUN.phase]]}, microbatch ${run[RUN.mb]}` +
      `\n${formatTime(run[1])} on rank ${row.rank}, step ${run[RUN.step]}` +
      `\ntask ${data.words[run[RUN.task]]}`,
  ];
}

function describeDevice(data, row, run) {
  const [title, words] = describeRun(data, row, run);
  return [title + " on the device", words];
}

function describeCopy(data, row, copy) {
  const [source, target] = copy[COPY.isSent] ? [row.rank, copy[COPY.peer]] :
    [copy[COPY.peer], row.rank];
  return [
    `${data.words[copy[COPY.what]]}: rank ${source} → rank ${target}`,
    `${formatBytes(copy[COPY.bytes])}, on rank ${row.rank} over after ${formatTime(copy[1])}`,
  ];
}

function describePlan(entry) {
  return [`${PHASES[entry[PLAN.phase]]}${entry[PLAN.mb]} in the plan`, formatTime(entry[1])];
}

function describeWait(data, wait) {
  return [
    `${PHASES[wait[WAIT.phase]]}${wait[WAIT.mb]} ${data.words[wait[WAIT.name]]} waits`,
    `for ${awaited(data, wait[WAIT.what], wait[WAIT.peer])}\n${formatTime(wait[1])}`,
  ];
}

function describeIdle(data, row, idle) {
  const task = data.words[idle[IDLE.task]];
  return [
    `rank ${row.rank} could run nothing`,
    `waited for ${awaited(data, idle[IDLE.what], idle[IDLE.peer])}\n${formatTime(idle[1])}` +
      (task ? `\nthen ran ${task}` : ""),
  ];
}

function describeTransfer(data, t) {
  return [
    `rank ${data.rows[t[SENT.source]].rank} → rank ${data.rows[t[SENT.target]].rank}`,
    `${formatBytes(t[SENT.bytes])}, microbatch ${t[SENT.mb]}, as ${data.words[t[SENT.what]]}` +
      `\n${formatTime(t[SENT.to] - t[SENT.from])} on its way`,
  ];
}
