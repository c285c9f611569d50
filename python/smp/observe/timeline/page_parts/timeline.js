"use strict";
// Shows the Chrome trace that smp.trace writes: functions that read it, then those that draw.

const GUTTER = 170;  // pixels of the column with the ranks
const AXIS = 22;
const GAP = 12;  // pixels between ranks
const MOST_ARROWS = 3000;
const MOST_WAITS = 8;  // rows of waits at one time
// Kinds of rows from top to bottom, with their height in pixels.
const HEIGHT = {planned: 13, executed: 32, device: 14, idle: 7, lane: 4, wait: 4};

// ---- reading

function rowKind(name) {
  return name.startsWith("lane ") ? "lane" : name;
}

// Returns ranks with rows of boxes, arrows between ranks, and what the trace says of its steps.
// Times are in microseconds from the beginning of the trace.
function readTrace(trace) {
  const ranks = new Map();
  const rows = new Map();  // by rank and thread
  const begun = new Map();  // waits and arrows, by their kind and id
  const arrows = [];
  for (const event of trace.traceEvents) {
    const key = `${event.pid} ${event.tid}`;
    if (event.name === "process_name") {
      ranks.set(event.pid, {pid: event.pid, name: event.args.name, rows: [], waits: []});
    } else if (event.name === "thread_name") {
      const row = {kind: rowKind(event.args.name), name: event.args.name, boxes: []};
      rows.set(key, row);
      ranks.get(event.pid).rows.push(row);
    } else if (event.ph === "X") {
      rows.get(key).boxes.push({...event, begin: event.ts, end: event.ts + event.dur});
    } else if (event.ph === "b" || event.ph === "s") {
      begun.set(`${event.cat} ${event.id}`, event);
    } else if (event.ph === "e") {
      const begin = begun.get(`${event.cat} ${event.id}`);
      ranks.get(event.pid).waits.push({...begin, begin: begin.ts, end: event.ts});
    } else if (event.ph === "f") {
      const begin = begun.get(`${event.cat} ${event.id}`);
      arrows.push({...begin, begin: begin.ts, end: event.ts, source: begin.pid, target: event.pid});
    }
  }
  for (const rank of ranks.values()) {
    rank.rows = rank.rows.filter((row) => row.kind in HEIGHT);
    for (const boxes of spread(rank.waits, MOST_WAITS)) {
      rank.rows.push({kind: "wait", name: "waits", boxes});
    }
    for (const row of rank.rows) row.boxes.sort((a, b) => a.begin - b.begin);
    const order = Object.keys(HEIGHT);
    rank.rows.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
  }
  return {ranks: [...ranks.values()], arrows, ...trace.otherData};
}

// Spreads boxes over rows in which they do not overlap. A box beyond the last row joins the row
// that is free first.
function spread(boxes, most) {
  const rows = [];
  const ends = [];
  for (const box of [...boxes].sort((a, b) => a.begin - b.begin)) {
    let row = ends.findIndex((end) => end <= box.begin);
    if (row < 0 && rows.length < most) row = rows.push([]) - 1;
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    rows[row].push(box);
    ends[row] = Math.max(ends[row] || 0, box.end);
  }
  return rows;
}

// Sets the place of each rank and row; returns the height of all.
function place(ranks) {
  let y = AXIS;
  for (const rank of ranks) {
    rank.y = y;
    for (const row of rank.rows) {
      row.y = y;
      if (row.boxes.length) y += HEIGHT[row.kind] + 2;
    }
    y = Math.max(y, rank.y + 54) + GAP;
    rank.bottom = y - GAP;
  }
  return y;
}

// Returns the index of the first box that ends after `time`; boxes do not overlap.
function firstAfter(boxes, time) {
  let [low, high] = [0, boxes.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Returns what a rank did in one step, or in all of them where `number` is null.
function figures(trace, rank, number) {
  const steps = trace.steps.filter(
    (step) => rank.pid in step.ranks && (number === null || step.number === number));
  const sum = (pick) => steps.reduce((total, step) => total + pick(step), 0);
  const counts = (box) => number === null || box.args.step === number;
  const reasons = new Map();
  for (const row of rank.rows.filter((row) => row.kind === "idle")) {
    for (const box of row.boxes.filter(counts)) {
      reasons.set(box.name, (reasons.get(box.name) || 0) + box.dur);
    }
  }
  const [busy, makespan] = [sum((s) => s.ranks[rank.pid].busy_us), sum((s) => s.makespan_us)];
  const planned = sum((s) => s.planned_us || 0);
  const free = sum((s) => (s.ranks[rank.pid].planned_bubble || 0) * (s.planned_us || 0));
  return {
    busy, makespan,
    bubble: makespan ? 1 - busy / makespan : null,
    planned: planned ? free / planned : null,
    sent: trace.arrows.filter((a) => a.source === rank.pid && counts(a))
      .reduce((total, arrow) => total + arrow.args.bytes, 0),
    reasons: [...reasons].sort((a, b) => b[1] - a[1]).slice(0, 3),
  };
}

// ---- words

function timeText(us) {
  if (Math.abs(us) >= 1e6) return (us / 1e6).toFixed(3) + " s";
  return Math.abs(us) >= 1e3 ? (us / 1e3).toFixed(3) + " ms" : us.toFixed(1) + " µs";
}

function bytesText(bytes) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1)) / 3)));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["bytes", "kB", "MB", "GB"][power]}`;
}

function shareText(share) {
  return share === null ? "–" : (100 * share).toFixed(1) + " %";
}

function tipText(box) {
  const args = Object.entries(box.args || {}).map(([name, value]) => `${name} ${value}`);
  return [box.name, timeText(box.end - box.begin), ...args].join("\n");
}

// Returns round times of the axis that are at least 90 pixels apart.
function ticks(begin, end, width) {
  const least = (end - begin) * 90 / width;
  const power = 10 ** Math.floor(Math.log10(least));
  const distance = [1, 2, 5, 10].map((m) => m * power).find((d) => d >= least);
  const values = [];
  for (let i = Math.ceil(begin / distance); i * distance <= end; ++i) values.push(i * distance);
  return values;
}

// ---- drawing

function show(trace) {
  const canvas = document.getElementById("canvas");
  const tip = document.getElementById("tip");
  const select = document.getElementById("step");
  const arrows = document.getElementById("arrows");
  const main = canvas.parentElement;
  const pen = canvas.getContext("2d");
  const total = place(trace.ranks);
  const byPid = new Map(trace.ranks.map((rank) => [rank.pid, rank]));
  const view = {begin: 0, end: 1, width: 0, height: 0};
  const colours = {};
  let hits = [];  // what was drawn where

  const toX = (time) =>
    GUTTER + (time - view.begin) / (view.end - view.begin) * (view.width - GUTTER);
  const toY = (y) => y - main.scrollTop;
  const number = () => select.value === "" ? null : Number(select.value);

  function colour(box) {
    if (!(box.args && "microbatch" in box.args) || box.cat === "wait") return colours.line;
    const phase = "FBW".indexOf(box.name[0]);
    const lightness = colours[["forward", "backward", "weight"][phase]];
    return `oklch(${lightness} 0.12 ${((250 + box.args.microbatch * 137.508) % 360).toFixed(1)})`;
  }

  function drawRow(row) {
    const [y, height] = [toY(row.y), HEIGHT[row.kind]];
    if (y > view.height || y + height < AXIS) return;
    let last = -1;
    for (let i = firstAfter(row.boxes, view.begin); i < row.boxes.length; ++i) {
      const box = row.boxes[i];
      if (box.begin > view.end) return;
      const x = Math.max(toX(box.begin), GUTTER);
      const width = Math.max(Math.min(toX(box.end), view.width) - x, 1);
      if (width <= 1 && Math.floor(x) === last) continue;  // boxes of one pixel count once
      last = Math.floor(x);
      pen.fillStyle = row.kind === "lane" ? colours.dim : colour(box);
      pen.fillRect(x, y, width > 4 ? width - 1 : width, height);
      hits.push({x, y, width, height, box});
      if (height > 12 && width > 24) {
        pen.fillStyle = box.name[0] === "F" ? "#10161d" : "#ffffff";
        const letters = Math.floor((width - 6) / 6.5);
        const short = box.name.length <= letters ? box.name : box.name.slice(0, letters - 1) + "…";
        pen.fillText(short, x + 3, y + height / 2 + 4);
      }
    }
  }

  function drawArrows() {
    const seen = trace.arrows.filter((a) => a.end >= view.begin && a.begin <= view.end);
    if (!arrows.checked || seen.length > MOST_ARROWS) return;
    pen.strokeStyle = colours.dim;
    for (const arrow of seen) {
      const ends = [arrow.source, arrow.target].map(
        (pid) => toY(byPid.get(pid).rows.find((row) => row.kind === "executed").y));
      const [x0, x1] = [Math.max(toX(arrow.begin), GUTTER), Math.max(toX(arrow.end), GUTTER)];
      const [y0, y1] = ends[0] < ends[1] ? [ends[0] + HEIGHT.executed, ends[1]] :
        [ends[0], ends[1] + HEIGHT.executed];
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
      pen.fillStyle = colours.dim;
      pen.fillRect(x1 - 2, y1 - 2, 4, 4);
      hits.push({x: x1 - 4, y: y1 - 4, width: 8, height: 8, box: arrow});
    }
  }

  function drawNames() {
    for (const rank of trace.ranks) {
      const y = toY(rank.y) + 13;
      const own = figures(trace, rank, number());
      pen.fillStyle = colours.page;
      pen.fillRect(0, toY(rank.y), GUTTER - 4, rank.bottom - rank.y);
      pen.fillStyle = colours.text;
      pen.fillText(rank.name, 12, y, GUTTER - 20);
      pen.fillStyle = colours.dim;
      pen.fillText(`bubble ${shareText(own.bubble)}`, 12, y + 16);
      pen.fillText(`plan ${shareText(own.planned)}`, 12, y + 32);
    }
  }

  function drawAxis() {
    pen.fillStyle = colours.band;
    pen.fillRect(0, 0, view.width, AXIS);
    pen.fillStyle = pen.strokeStyle = colours.dim;
    for (const time of ticks(view.begin, view.end, view.width - GUTTER)) {
      pen.fillText(timeText(time), toX(time) + 3, AXIS - 7);
    }
    pen.setLineDash([3, 3]);
    for (const time of trace.steps.flatMap((step) => [step.begin_us, step.end_us])) {
      if (toX(time) < GUTTER) continue;
      pen.beginPath();
      pen.moveTo(toX(time), 0);
      pen.lineTo(toX(time), view.height);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["page", "text", "dim", "line", "band", "forward", "backward", "weight"]) {
      colours[name] = style.getPropertyValue("--" + name).trim();
    }
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = colours.page;
    pen.fillRect(0, 0, view.width, view.height);
    hits = [];
    for (const rank of trace.ranks) rank.rows.forEach(drawRow);
    drawArrows();
    drawNames();
    drawAxis();
  }

  function fit() {
    const ratio = window.devicePixelRatio || 1;
    view.width = main.clientWidth;
    view.height = Math.min(total, Math.max(260, window.innerHeight * 0.8));
    canvas.style.height = view.height + "px";
    document.getElementById("space").style.height = total - view.height + "px";
    [canvas.width, canvas.height] = [view.width * ratio, view.height * ratio];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  function setView(begin, end) {
    [view.begin, view.end] = [begin, Math.max(end, begin + 1)];
    draw();
  }

  function showStep() {
    const steps = trace.steps.filter((s) => number() === null || s.number === number());
    showTable(trace, number());
    setView(Math.min(...steps.map((s) => s.begin_us)), Math.max(...steps.map((s) => s.end_us)));
  }

  function showTip(event) {
    const hit = hits.findLast((one) => event.offsetX >= one.x && event.offsetY >= one.y &&
      event.offsetX <= one.x + one.width && event.offsetY <= one.y + one.height);
    tip.hidden = !hit;
    if (!hit) return;
    tip.textContent = tipText(hit.box);
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 16 + "px";
  }

  function move(pixels) {
    const shift = pixels * (view.end - view.begin) / (view.width - GUTTER);
    setView(view.begin + shift, view.end + shift);
  }

  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const share = Math.max(event.offsetX - GUTTER, 0) / (view.width - GUTTER);
      const time = view.begin + share * (view.end - view.begin);
      const factor = 1.0018 ** event.deltaY;
      setView(time - (time - view.begin) * factor, time + (view.end - time) * factor);
    } else if (event.deltaX) {
      event.preventDefault();
      move(event.deltaX);
    }
  }, {passive: false});
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) move(-event.movementX);
    showTip(event);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", showStep);
  select.addEventListener("change", showStep);
  arrows.addEventListener("change", draw);
  main.addEventListener("scroll", draw);
  window.addEventListener("resize", () => {
    fit();
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const numbers = [...new Set(trace.steps.map((step) => step.number))];
  for (const one of numbers) select.add(new Option(`step ${one}`, one));
  if (numbers.length > 1) select.add(new Option("all steps", ""), 0);
  select.selectedIndex = 0;
  fit();
  showStep();
}

function showTable(trace, number) {
  const line = (tag, values) => {
    const row = document.createElement("tr");
    row.append(...values.map((value) => {
      const cell = document.createElement(tag);
      cell.textContent = value;
      return cell;
    }));
    return row;
  };
  const rows = trace.ranks.map((rank) => {
    const own = figures(trace, rank, number);
    const reasons = own.reasons.map(([words, time]) => `${timeText(time)} for ${words}`);
    return line("td", [rank.name, timeText(own.busy), timeText(own.makespan),
      shareText(own.bubble), shareText(own.planned), bytesText(own.sent), reasons.join("; ")]);
  });
  const head = line("th", ["rank", "busy", "of", "bubble", "plan", "sent", "was idle"]);
  document.getElementById("figures").replaceChildren(head, ...rows);
}

function showWords(trace) {
  const step = trace.steps[0];
  document.getElementById("summary").textContent =
    `${trace.ranks.length} ranks · ${step.microbatches} microbatches · schedule ${trace.policy} · ` +
    `tasks of step ${step.number} take ${timeText(step.makespan_us)}`;
  document.getElementById("notes").replaceChildren(...trace.notes.map((note) => {
    const item = document.createElement("li");
    item.textContent = note;
    return item;
  }));
}

if (typeof document !== "undefined") {
  const trace = readTrace(JSON.parse(document.getElementById("trace").textContent));
  showWords(trace);
  show(trace);
}
