// Draws and listens; numbers and words come from timeline_view.js.

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const pen = canvas.getContext("2d");
const tip = document.getElementById("tip");
const controls = {
  step: document.getElementById("step"),
  plan: document.getElementById("show-plan"),
  arrows: document.getElementById("show-arrows"),
  waits: document.getElementById("show-waits"),
};
const view = {begin: 0, end: 1, scroll: 0, width: 0, height: 0, step: null, origin: 0};
const faded = new Set();  // microbatches
let places = layout(data, {plan: true, waits: true, copies: true});
let theme = {};
let hatches = new Map();
let hovered = null;
let cursor = null;
let hint = "";  // why there are no arrows
let gutterFigures = [];

// ---- colours

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "text", "dim", "line", "band", "hatch", "axis", "cursor"]) {
    theme[name] = style.getPropertyValue("--" + name).trim();
  }
  for (const name of ["forward", "backward", "weight", "chroma", "arrow"]) {
    theme[name] = parseFloat(style.getPropertyValue("--" + name));
  }
  hatches = new Map([["idle", hatch(theme.hatch, 7, 1)]]);
}

function hatch(ink, size, width) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const brush = tile.getContext("2d");
  brush.strokeStyle = ink;
  brush.lineWidth = width;
  brush.beginPath();
  for (const shift of [-size, 0, size]) {
    brush.moveTo(shift - 1, size + 1);
    brush.lineTo(shift + size + 1, -1);
  }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

// Of the waits of a microbatch, made when first needed.
function waitHatch(mb) {
  if (!hatches.has(mb)) hatches.set(mb, hatch(colour(theme, 1, mb), 4, 1.6));
  return hatches.get(mb);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  readTheme();
  makeLegend();
  draw();
}

// ---- where things are

const toX = (time) =>
  GUTTER + (time - view.begin) / (view.end - view.begin) * (view.width - GUTTER);
const toTime = (x) =>
  view.begin + (x - GUTTER) / (view.width - GUTTER) * (view.end - view.begin);
const toY = (y) => AXIS + y - view.scroll;

function arrowEnds(t) {
  const source = places.places[t[SENT.source]].run;
  const target = places.places[t[SENT.target]].run;
  const down = source.y < target.y;
  return [
    toX(t[SENT.from]), toY(down ? source.y + source.height : source.y),
    toX(t[SENT.to]), toY(down ? target.y : target.y + target.height),
  ];
}

function visibleArrows() {
  hint = "";
  if (!controls.arrows.checked) return [];
  const found = data.transfers.filter(
    (t) => t[SENT.to] >= view.begin && t[SENT.from] <= view.end && !faded.has(t[SENT.mb]));
  hint = found.length > MOST_ARROWS ? `${found.length} tensors: zoom in to see their arrows` : "";
  return hint ? [] : found;
}

// ---- drawing

let isWaiting = false;
function draw() {
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    drawNow();
  });
}

function drawNow() {
  pen.fillStyle = theme.page;
  pen.fillRect(0, 0, view.width, view.height);
  data.rows.forEach((row, i) => drawBand(places.places[i], i));
  drawSteps();
  data.rows.forEach((row, i) => drawRow(row, places.places[i]));
  for (const t of visibleArrows()) drawArrow(t);
  if (hovered && hovered.box) drawHover(hovered.box);
  drawGutter();
  drawAxis();
  if (cursor !== null) {
    pen.strokeStyle = theme.cursor;
    line(cursor, AXIS, cursor, view.height);
  }
}

function line(x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function drawBand(place, i) {
  if (i % 2 === 0) {
    pen.fillStyle = theme.band;
    pen.fillRect(0, toY(place.top), view.width, place.bottom - place.top);
  }
}

function drawSteps() {
  pen.strokeStyle = theme.dim;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  for (const step of data.steps) {
    for (const x of [toX(step.begin), toX(step.end)]) line(x, AXIS - 14, x, view.height);
  }
  pen.setLineDash([]);
}

// Calls back with what is visible of entries that do not overlap; those that
// would fall on one pixel count once.
function eachVisible(entries, callback) {
  let last = -1;
  for (let i = firstAfter(entries, view.begin); i < entries.length; ++i) {
    const entry = entries[i];
    if (entry[0] > view.end) return;
    const x = Math.max(toX(entry[0]), GUTTER - 2);
    const right = Math.min(toX(entry[0] + entry[1]), view.width + 2);
    if (right - x < 1 && Math.floor(x) === last) continue;
    last = Math.floor(x);
    callback(entry, x, Math.max(right - x, 1));
  }
}

function drawRow(row, place) {
  const top = toY(place.top);
  if (top > view.height || toY(place.bottom) < AXIS) return;
  eachVisible(row.idles, (idle, x, width) => {
    pen.fillStyle = hatches.get("idle");
    pen.fillRect(x, toY(place.run.y) + 8, width, place.run.height - 16);
  });
  if (controls.plan.checked) {
    eachVisible(row.plan, (entry, x, width) => {
      drawBox(x, toY(place.plan.y), width, place.plan.height, entry[PLAN.phase], entry[PLAN.mb], "",
        9.5);
    });
  }
  eachVisible(row.runs, (run, x, width) => {
    drawBox(x, toY(place.run.y), width, place.run.height, run[RUN.phase], run[RUN.mb],
      data.words[run[RUN.name]], 11.5);
  });
  eachVisible(row.device, (run, x, width) => {
    drawBox(x, toY(place.device.y), width, place.device.height, run[RUN.phase], run[RUN.mb], "",
      9.5);
  });
  for (const lane of place.copies) {
    pen.fillStyle = theme.dim;
    eachVisible(lane.entries, (copy, x, width) => {
      pen.fillRect(x, toY(lane.y), width, lane.height);
    });
  }
  place.lanes.forEach((lane, i) => {
    for (const wait of lane) {
      const x = toX(wait[0]);
      const right = toX(wait[0] + wait[1]);
      if (right < GUTTER || x > view.width) continue;
      pen.globalAlpha = faded.has(wait[WAIT.mb]) ? 0.15 : 1;
      pen.fillStyle = waitHatch(wait[WAIT.mb]);
      pen.fillRect(x, toY(place.waits.y + LANE * i), Math.max(right - x, 1), place.waits.height);
    }
    pen.globalAlpha = 1;
  });
}

function drawBox(x, y, width, height, phase, mb, name, size) {
  pen.globalAlpha = faded.has(mb) ? 0.12 : 1;
  pen.fillStyle = colour(theme, phase, mb);
  const gap = width > 4 ? 1 : 0;
  pen.fillRect(x, y, width - gap, height);
  const label = PHASES[phase] + mb;
  pen.font = `600 ${size}px system-ui, "DejaVu Sans", sans-serif`;
  const labelWidth = label.length * size * 0.66;
  if (width > labelWidth + 4) {
    pen.fillStyle = phase === 0 ? "#10161d" : "#ffffff";
    pen.textBaseline = "middle";
    const isTall = height > 24;
    pen.fillText(label, x + 4, y + height / 2 - (isTall && name ? 6 : 0) + 0.5);
    if (isTall && name) {
      pen.font = `${size - 1.5}px system-ui, "DejaVu Sans", sans-serif`;
      const short = shorten(name, Math.floor((width - 8) / ((size - 1.5) * 0.6)));
      pen.fillText(short, x + 4, y + height / 2 + 7.5);
    }
  }
  pen.globalAlpha = 1;
}

function drawArrow(t) {
  const [x0, y0, x1, y1] = arrowEnds(t);
  pen.strokeStyle = pen.fillStyle =
    `oklch(${theme.arrow} 0.13 ${hue(t[SENT.mb]).toFixed(1)} / 0.8)`;
  pen.lineWidth = hovered && hovered.arrow === t ? 3 :
    Math.min(2.2, 0.7 + Math.log10(1 + t[SENT.bytes] / 1000) / 2.5);
  line(x0, y0, x1, y1);
  const angle = Math.atan2(y1 - y0, x1 - x0);
  pen.beginPath();
  pen.moveTo(x1, y1);
  for (const side of [-0.4, 0.4]) {
    pen.lineTo(x1 - 7 * Math.cos(angle + side), y1 - 7 * Math.sin(angle + side));
  }
  pen.fill();
}

function drawHover(box) {
  pen.strokeStyle = theme.text;
  pen.lineWidth = 1.5;
  pen.strokeRect(box.x, box.y, box.width, box.height);
}

function drawGutter() {
  pen.textBaseline = "alphabetic";
  data.rows.forEach((row, i) => {
    const place = places.places[i];
    if (place.heading !== null) {
      pen.fillStyle = theme.page;
      pen.fillRect(0, toY(place.heading), view.width, 22);
      pen.fillStyle = theme.dim;
      pen.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
      pen.fillText(`replica ${row.replica}`, 12, toY(place.heading) + 15);
    }
    pen.fillStyle = i % 2 === 0 ? theme.band : theme.page;
    pen.fillRect(0, toY(place.top), GUTTER - 6, place.bottom - place.top);
    const y = toY(place.top) + 20;
    pen.fillStyle = theme.text;
    pen.font = "600 13px system-ui, 'DejaVu Sans', sans-serif";
    pen.fillText(`rank ${row.rank}`, 12, y);
    const width = pen.measureText(`rank ${row.rank}`).width;
    pen.fillStyle = theme.dim;
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.fillText(`stage ${row.pp}`, 12 + width + 10, y);
    pen.fillStyle = theme.text;
    pen.fillText(`bubble ${formatPart(gutterFigures[i].bubble)}`, 12, y + 17);
    pen.fillStyle = theme.dim;
    pen.fillText(`plan ${formatPart(gutterFigures[i].planned)}`, 12, y + 33);
  });
  pen.fillStyle = theme.line;
  pen.fillRect(GUTTER - 6, 0, 1, view.height);
}

function drawAxis() {
  pen.fillStyle = theme.axis;
  pen.fillRect(0, 0, view.width, AXIS);
  pen.font = "11.5px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "alphabetic";
  const shift = view.origin;
  const marks = ticks(view.begin - shift, view.end - shift, view.width - GUTTER);
  const digits = Math.max(0, -Math.floor(Math.log10(marks.distance / 1000)));
  pen.fillStyle = pen.strokeStyle = theme.dim;
  pen.lineWidth = 1;
  for (const value of marks.values) {
    const x = toX(value + shift);
    if (x < GUTTER) continue;
    line(x, AXIS - 6, x, AXIS);
    pen.fillText((value / 1000).toFixed(digits) + " ms", x + 4, AXIS - 5);
  }
  pen.font = "600 11.5px system-ui, 'DejaVu Sans', sans-serif";
  pen.fillStyle = theme.text;
  const seen = new Set();
  for (const step of data.steps) {
    const left = Math.max(toX(step.begin), GUTTER);
    if (seen.has(step.number) || toX(step.end) - left < 60 || left > view.width) continue;
    seen.add(step.number);
    pen.fillText(`step ${step.number}`, left + 4, 15);
  }
  if (hint) {
    const width = pen.measureText(hint).width + 16;
    pen.fillStyle = theme.axis;
    pen.fillRect(view.width - width - 8, 2, width + 8, 18);
    pen.fillStyle = theme.dim;
    pen.fillText(hint, view.width - width, 15);
  }
  pen.fillStyle = theme.axis;
  pen.fillRect(0, 0, GUTTER - 6, AXIS);
  pen.fillStyle = theme.dim;
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  pen.fillText(view.step === null ? "all steps" : `step ${view.step}`, 12, 25);
}

// ---- what is under the mouse

function find(x, y) {
  if (x < GUTTER || y < AXIS) return null;
  const time = toTime(x);
  const i = places.places.findIndex((p) => y >= toY(p.top) && y < toY(p.bottom));
  if (i >= 0) {
    const found = findInRow(data.rows[i], places.places[i], time, y);
    if (found) return found;
  }
  const arrow = findArrow(x, y);
  if (arrow) return {words: describeTransfer(data, arrow), arrow};
  return i >= 0 ? findIdle(data.rows[i], places.places[i], time, y) : null;
}

function entryAt(entries, time) {
  const slack = (view.end - view.begin) / (view.width - GUTTER);
  const entry = entries[firstAfter(entries, time - slack)];
  return entry && entry[0] <= time + slack ? entry : null;
}

function boxOf(entry, lane) {
  const x = Math.max(toX(entry[0]), GUTTER);
  const right = toX(entry[0] + entry[1]);
  return {x, y: toY(lane.y), width: Math.max(right - x, 1), height: lane.height, entry};
}

function findInRow(row, place, time, y) {
  const isIn = (lane) => y >= toY(lane.y) && y < toY(lane.y) + lane.height;
  if (isIn(place.plan)) {
    const entry = entryAt(row.plan, time);
    return entry && {words: describePlan(entry), box: boxOf(entry, place.plan)};
  }
  if (isIn(place.run)) {
    const run = entryAt(row.runs, time);
    return run && {words: describeRun(data, row, run), box: boxOf(run, place.run)};
  }
  if (isIn(place.device)) {
    const run = entryAt(row.device, time);
    return run && {words: describeDevice(data, row, run), box: boxOf(run, place.device)};
  }
  const track = place.copies.find(isIn);
  if (track) {
    const copy = entryAt(track.entries, time);
    return copy && {words: describeCopy(data, row, copy), box: boxOf(copy, track)};
  }
  const lane = place.lanes[Math.floor((y - toY(place.waits.y)) / LANE)];
  const wait = lane && lane.find((w) => w[0] <= time && w[0] + w[1] >= time);
  if (!wait) return null;
  const shifted = {y: place.waits.y + LANE * place.lanes.indexOf(lane), height: place.waits.height};
  return {words: describeWait(data, wait), box: boxOf(wait, shifted)};
}

function findArrow(x, y) {
  let best = null;
  let least = 5;
  for (const t of visibleArrows()) {
    const [x0, y0, x1, y1] = arrowEnds(t);
    const length = (x1 - x0) ** 2 + (y1 - y0) ** 2 || 1;
    const part = Math.min(1, Math.max(0, ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / length));
    const distance = Math.hypot(x - x0 - part * (x1 - x0), y - y0 - part * (y1 - y0));
    if (distance < least) [best, least] = [t, distance];
  }
  return best;
}

function findIdle(row, place, time, y) {
  if (y < toY(place.run.y) || y > toY(place.run.y) + place.run.height) return null;
  const idle = entryAt(row.idles, time);
  return idle && {words: describeIdle(data, row, idle), box: boxOf(idle, place.run)};
}

function showTip(x, y) {
  hovered = find(x, y);
  tip.hidden = !hovered;
  if (!hovered) return;
  const title = document.createElement("b");
  title.textContent = hovered.words[0];
  tip.replaceChildren(title, "\n" + hovered.words[1]);
  const left = Math.min(x + 14, view.width - tip.offsetWidth - 8);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = (y + 18 + tip.offsetHeight > view.height ? y - tip.offsetHeight - 10 : y + 18) + "px";
}

// ---- moving

function setView(begin, end) {
  const all = data.end * 1.02;
  const length = Math.min(Math.max(end - begin, 2), all);
  view.begin = Math.min(Math.max(begin, -0.01 * data.end), data.end * 1.01 - length);
  view.end = view.begin + length;
  draw();
}

function zoom(factor, x) {
  const time = toTime(x);
  setView(time - (time - view.begin) * factor, time + (view.end - time) * factor);
}

function move(pixels) {
  const shift = pixels * (view.end - view.begin) / (view.width - GUTTER);
  setView(view.begin + shift, view.end + shift);
}

function setScroll(scroll) {
  view.scroll = Math.max(0, Math.min(scroll, places.height - (view.height - AXIS)));
}

function showStep(text) {
  view.step = text === "" ? null : Number(text);
  const spans = data.steps.filter((s) => view.step === null || s.number === view.step);
  const begin = Math.min(...spans.map((s) => s.begin));
  const end = Math.max(...spans.map((s) => s.end));
  view.origin = begin;
  gutterFigures = data.rows.map((row, i) => figures(data, i, view.step));
  makeTable();
  setView(begin - 0.01 * (end - begin), end + 0.01 * (end - begin));
}

function fit() {
  places = layout(data, {
    plan: controls.plan.checked, waits: controls.waits.checked, copies: controls.arrows.checked,
  });
  const ratio = window.devicePixelRatio || 1;
  view.width = canvas.parentElement.clientWidth;
  view.height = Math.min(places.height + AXIS + 4, Math.max(260, window.innerHeight * 0.8));
  canvas.style.height = view.height + "px";
  canvas.width = Math.round(view.width * ratio);
  canvas.height = Math.round(view.height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  setScroll(view.scroll);
  draw();
}

// ---- around the canvas

function makeLegend() {
  const legend = document.getElementById("legend");
  const count = Math.max(...data.steps.map((s) => s.microbatches));
  const chips = [];
  for (let mb = 0; mb < Math.min(count, 64); ++mb) {
    const chip = document.createElement("span");
    chip.className = "chip" + (faded.has(mb) ? " off" : "");
    chip.style.background = colour(theme, 0, mb);
    chip.textContent = `mb ${mb}`;
    chip.title = "click: this microbatch alone; again: all";
    chip.onclick = () => {
      const isAlone = !faded.has(mb) && faded.size === count - 1;
      faded.clear();
      for (let other = 0; other < count && !isAlone; ++other) if (other !== mb) faded.add(other);
      makeLegend();
      draw();
    };
    chips.push(chip);
  }
  const key = (style, text) => {
    const entry = document.createElement("span");
    entry.className = "key";
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = style;
    entry.append(swatch, text);
    return entry;
  };
  const stripes = (ink) =>
    `repeating-linear-gradient(135deg, ${ink} 0 1.5px, transparent 1.5px 4px)`;
  legend.replaceChildren(
    ...chips,
    key(colour(theme, 0, 0), "light: forward"),
    key(colour(theme, 1, 0), "dark: backward"),
    key(stripes(theme.hatch), "rank idle"),
    key(stripes(colour(theme, 1, 0)), "a task waits"),
    ...(data.rows.some((row) => row.device.length) ? [key(theme.text, "lower row: the device")] : []),
    ...(data.rows.some((row) => row.copies.length) ? [key(theme.dim, "thin: over a lane")] : []));
}

function cells(tag, values) {
  const row = document.createElement("tr");
  values.forEach((value, i) => {
    const cell = document.createElement(tag);
    cell.textContent = value;
    if (i === values.length - 1) cell.className = "words";
    row.append(cell);
  });
  return row;
}

function makeTable() {
  const rows = data.rows.map((row, i) => {
    const f = gutterFigures[i];
    const reasons = f.reasons.map(([words, time]) => `${formatTime(time)} for ${words}`).join("; ");
    return cells("td", [`${row.rank} (${row.place})`, f.tasks, formatTime(f.busy),
      formatTime(f.makespan), formatPart(f.bubble), formatPart(f.planned), formatBytes(f.sent),
      formatBytes(f.copied), reasons || "–"]);
  });
  document.getElementById("figures").replaceChildren(
    cells("th", ["rank", "boxes", "busy", "of", "bubble", "plan", "tensors sent", "over lanes",
      "was idle"]),
    ...rows);
}

function summary() {
  const numbers = [...new Set(data.steps.map((s) => s.number))];
  const mean = (pick) => data.steps.reduce((sum, s) => sum + pick(s), 0) / data.steps.length;
  const words = [
    `${data.rows.length} ${data.rows.length === 1 ? "rank" : "ranks"}`,
    data.replicas > 1 ? `${data.replicas} replicas` : "",
    `${numbers.length} ${numbers.length === 1 ? "step" : "steps"}`,
    `${data.steps[0].microbatches} microbatches`, `schedule ${data.policy}`,
    `tasks of a step take ${formatTime(mean((s) => s.makespan))}`,
    data.steps.every((s) => s.planned !== null) ?
      `planned ${formatTime(mean((s) => s.planned))}` : "",
  ];
  document.getElementById("summary").textContent = words.filter(Boolean).join(" · ");
  for (const number of numbers) controls.step.add(new Option(`step ${number}`, number));
  if (numbers.length > 1) controls.step.add(new Option("all steps", ""), 0);
  document.getElementById("notes").replaceChildren(...data.notes.map((note) => {
    const item = document.createElement("li");
    item.textContent = note;
    return item;
  }));
}

// ---- listening

function listen() {
  let grabbed = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(event.deltaX || event.deltaY);
    } else {
      zoom(1.0018 ** event.deltaY, Math.max(event.offsetX, GUTTER));
    }
  }, {passive: false});
  canvas.addEventListener("pointerdown", (event) => {
    grabbed = {x: event.offsetX, y: event.offsetY};
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("moving");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed) {
      setScroll(view.scroll + grabbed.y - event.offsetY);
      move(grabbed.x - event.offsetX);
      grabbed = {x: event.offsetX, y: event.offsetY};
      tip.hidden = true;
    } else {
      showTip(event.offsetX, event.offsetY);
    }
    cursor = event.offsetX >= GUTTER ? event.offsetX : null;
    draw();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => {
      grabbed = null;
      canvas.classList.remove("moving");
    });
  }
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    hovered = cursor = null;
    draw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const found = find(event.offsetX, event.offsetY);
    if (!found || !found.box) return;
    const [begin, duration] = found.box.entry;
    setView(begin - duration * 0.1, begin + duration * 1.1);
  });
  canvas.addEventListener("keydown", (event) => {
    const middle = GUTTER + (view.width - GUTTER) / 2;
    const actions = {
      ArrowLeft: () => move(-80), ArrowRight: () => move(80),
      "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle),
      "0": () => showStep(controls.step.value),
    };
    if (actions[event.key]) {
      actions[event.key]();
      event.preventDefault();
    }
  });
  controls.step.addEventListener("change", () => showStep(controls.step.value));
  for (const box of [controls.plan, controls.arrows, controls.waits]) {
    box.addEventListener("change", fit);
  }
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  window.addEventListener("resize", fit);
}

const prefersDark = window.matchMedia && matchMedia("(prefers-color-scheme: dark)").matches;
summary();
fit();
showStep(controls.step.value);
setTheme(prefersDark ? "dark" : "light");
listen();
