"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.querySelector(`#${id} .body`);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) node.setAttribute(k, v);
  for (const c of children.flat()) node.append(c instanceof Node ? c : String(c));
  return node;
}
function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  return node;
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${n >= 100 || i === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[i]}`;
}
function seconds(s) {
  if (!(s > 0)) return "0";
  if (s >= 1) return `${s.toFixed(s >= 100 ? 0 : 2)} s`;
  if (s >= 1e-3) return `${(s * 1e3).toFixed(s >= 0.1 ? 0 : 2)} ms`;
  return `${(s * 1e6).toFixed(1)} µs`;
}
function count(n) {
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) if (n >= size) return `${(n / size).toFixed(n / size >= 100 ? 0 : 1)} ${unit}`;
  return String(Math.round(n));
}
const percent = (x) => `${(100 * x).toFixed(x < 0.1 ? 2 : 1)} %`;
const signed = (x) => `${x < 0 ? "" : "+"}${(100 * x).toFixed(1)} %`;

function tile(value, label, kind) {
  return el("div", { class: "tile" }, el("b", kind ? { class: kind } : {}, value), el("span", {}, label));
}
function table(head, rows) {
  const cell = (tag, c) => el(tag, c.num ? { class: "num" } : {}, c.text ?? c);
  return el("div", { class: "table" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((h) => cell("th", typeof h === "string" ? { text: h } : h)))),
    el("tbody", {}, rows.map((r) => el("tr", {}, r.map((c) => cell("td", typeof c === "string" ? { text: c } : c)))))));
}
const num = (text) => ({ text, num: true });

function verdict() {
  const p = data.predicted, s = data.search, body = at("verdict");
  for (const line of data.verdict) body.append(el("p", { class: "lead" }, line));
  const peak = Math.max(...data.memory.stages.map((m) => m.total));
  const fits = peak <= data.memory.limit_bytes;
  const tiles = [
    tile(seconds(p.step_time_s), data.workload.mode === "train" ? "predicted step time" : "predicted latency"),
    tile(bytes(peak), `peak memory of ${bytes(data.memory.limit_bytes)}`, fits ? "good" : "bad"),
    tile(percent(s.gap), `gap to the proven bound ${s.bound}`, s.gap <= 0.01 ? "good" : "warn"),
  ];
  if (p.per_s) tiles.push(tile(count(p.per_s), `${p.unit} per second`));
  if (p.mfu) tiles.push(tile(percent(p.mfu), `of peak FLOP/s (${p.tflops_per_gpu.toFixed(0)} TFLOP/s per GPU)`));
  body.append(el("div", { class: "tiles" }, tiles));
  const b = p.breakdown;
  const parts = [["compute", b.compute_s, "--c0"], ["communication", b.communication_s, "--c5"],
    ["pipeline bubble", b.bubble_s, "--c3"], ["optimizer", b.optimizer_s, "--c1"]].filter((x) => x[1] > 0);
  const total = parts.reduce((a, x) => a + x[1], 0) || 1;
  body.append(el("h3", {}, "Where the time goes"),
    el("div", { class: "legend" }, parts.map(([name, t, c]) => el("span", {}, el("i", { style: `background:var(${c})` }), `${name} ${seconds(t)}`))),
    el("div", { class: "track" }, parts.map(([name, t, c]) => el("div", { style: `width:${100 * t / total}%;background:var(${c})`, title: `${name} ${seconds(t)}` }))));
}

function memory() {
  const body = at("memory"), kinds = [["parameters", "--c0"], ["optimizer", "--c1"], ["gradients", "--c2"],
    ["activations", "--c4"], ["workspace", "--c5"], ["constants", "--c3"]];
  const limit = data.memory.limit_bytes;
  const peak = Math.max(...data.memory.stages.map((m) => m.total));
  // A small model would be invisible against the limit.
  const scale = peak > limit / 20 ? Math.max(limit, peak) : peak;
  body.append(el("div", { class: "legend" }, kinds.map(([k, c]) => el("span", {}, el("i", { style: `background:var(${c})` }), k))));
  for (const m of data.memory.stages) {
    body.append(el("div", { class: "bar", "data-stage": m.stage }, el("span", {}, `stage ${m.stage}, ranks ${m.ranks}`),
      el("div", { class: "track" }, kinds.filter(([k]) => m[k] > 0).map(([k, c]) =>
        el("div", { style: `width:${100 * m[k] / scale}%;background:var(${c})`, title: `${k} ${bytes(m[k])}` }))),
      el("span", { class: m.total <= limit ? "" : "bad" }, `${bytes(m.total)} (${percent(m.total / limit)})`)));
  }
  body.append(el("p", {}, `Each bar is one rank of the stage; a full bar is ${bytes(scale)}. ${data.memory.compiled ? "The figures are the sizes of the arenas that the compiled programs use." : "The figures are estimates: there are no programs for this schedule."}`));
  body.append(table(["stage", ...kinds.map(([k]) => num(k)), num("total")],
    data.memory.stages.map((m) => [String(m.stage), ...kinds.map(([k]) => num(bytes(m[k]))), num(bytes(m.total))])));
}

function mesh() {
  const body = at("mesh"), axes = data.mesh.axes;
  const words = axes.map((a) => `${a.name}=${a.size}`).join(" × ") || "one rank";
  body.append(el("p", {}, `${data.mesh.stages} pipeline stage${data.mesh.stages > 1 ? "s" : ""}, each of ${words}.`));
  const last = axes.length ? axes[axes.length - 1].size : 1, per = data.mesh.ranks_per_stage;
  const shown = Math.min(data.mesh.stages, 8);
  const grid = el("div", { class: "grid" });
  for (let s = 0; s < shown; s++) {
    const ranks = [];
    for (let r = 0; r < Math.min(per, 256); r++) ranks.push(el("div", { class: "rank" }, s * per + r));
    grid.append(el("div", { class: "stage" }, el("b", {}, `stage ${s}`), ` ${data.mesh.holds[s] || ""}`,
      el("div", { class: "ranks", style: `grid-template-columns:repeat(${Math.min(last, 16)}, 1fr)` }, ranks),
      per > 256 ? el("p", {}, `and ${per - 256} more ranks`) : ""));
  }
  body.append(grid);
  if (data.mesh.stages > shown) body.append(el("p", {}, `and ${data.mesh.stages - shown} more stages`));
  if (axes.length) body.append(el("p", {}, `Rows of the picture run over ${axes[axes.length - 1].name}, the axis on neighbouring ranks.`));
}

function timeline() {
  const t = data.timeline, body = at("timeline");
  if (!t || !t.events.length) { body.append(el("p", {}, "No timeline.")); return; }
  const rowHeight = 26, left = 70, width = 1000, height = t.stages * rowHeight + 24;
  const x = (s) => left + (width - left) * s / t.end_s;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": "pipeline timeline" });
  const colour = { forward: "--c0", backward: "--c4", weights: "--c2", update: "--c1" };
  const title = { weights: "gradients by weights" };
  const kinds = Object.keys(colour).filter((k) => t.events.some((e) => e.kind === k));
  for (let s = 0; s < t.stages; s++) picture.append(svg("text", { x: 0, y: s * rowHeight + 17 }, `stage ${s}`));
  for (const e of t.events) {
    const w = Math.max(x(e.end_s) - x(e.start_s), 0.3);
    const box = svg("rect", { x: x(e.start_s), y: e.stage * rowHeight + 3, width: w, height: rowHeight - 6, rx: 2, fill: `var(${colour[e.kind]})`, stroke: "var(--card)", "stroke-width": 0.6 });
    box.append(svg("title", {}, `${title[e.kind] || e.kind}${e.kind === "update" ? "" : " of micro-batch " + e.micro_batch}: ${seconds(e.start_s)} to ${seconds(e.end_s)}`));
    picture.append(box);
    if (w > 16 && e.kind !== "update") {
      const label = svg("text", { x: x(e.start_s) + w / 2, y: e.stage * rowHeight + 17, "text-anchor": "middle", style: "fill:#fff" }, e.micro_batch);
      picture.append(label);
    }
  }
  for (let i = 0; i <= 4; i++) {
    const s = t.end_s * i / 4;
    picture.append(svg("text", { x: x(s), y: height - 4, "text-anchor": i === 4 ? "end" : "middle" }, seconds(s)));
  }
  body.append(el("div", { class: "legend" }, kinds.map((k) => el("span", {}, el("i", { style: `background:var(${colour[k]})` }), title[k] || k))), picture);
}

function blocks() {
  const body = at("blocks");
  const search = el("input", { type: "search", placeholder: "Filter operators, scopes, specs, collectives" });
  body.append(el("p", {}, "A spec gives per tensor dim the mesh axes that shard it; _ is whole; partial sums are combined where a collective is shown. Blocks that repeat are shown once. Next best: the best other split with all else chosen anew, and what a step takes more."), search);
  const rows = [];
  data.blocks.forEach((b, i) => {
    const lines = b.ops.map((o) => {
      const row = el("tr", {},
        el("td", {}, el("code", {}, o.op), el("br"), el("small", {}, o.name)),
        el("td", {}, o.section),
        el("td", {}, o.strategy, o.next_best ? [el("br"), el("small", {}, `next best ${o.next_best}`)] : []),
        el("td", {}, o.inputs.map((s) => el("div", { class: "spec" }, s))),
        el("td", {}, o.outputs.map((s) => el("div", { class: "spec" }, s))),
        el("td", { class: "comm" }, o.collectives.map((c) => el("div", {}, c))),
        el("td", { class: "num" }, seconds(o.time_s)));
      rows.push([row, `${o.op} ${o.name} ${o.section} ${o.strategy} ${o.inputs.join(" ")} ${o.outputs.join(" ")} ${o.collectives.join(" ")}`.toLowerCase()]);
      return row;
    });
    const open = i === 0 || b.count > 1 ? { open: "" } : {};
    body.append(el("details", open, el("summary", {}, b.title + " ", el("small", {}, b.subtitle)),
      el("div", { class: "table" }, el("table", {},
        el("thead", {}, el("tr", {}, ["operator", "when", "split", "operands", "results", "collectives before it"].map((h) => el("th", {}, h)), el("th", { class: "num" }, "time"))),
        el("tbody", {}, lines)))));
  });
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [row, text] of rows) row.style.display = words.every((w) => text.includes(w)) ? "" : "none";
  });
}

function alternatives() {
  const body = at("alternatives");
  if (!data.alternatives.length) { body.append(el("p", {}, "No other configuration was feasible.")); return; }
  const best = data.alternatives[0].time_s;
  body.append(table(["configuration", num("time"), num("against the plan"), num("peak memory"), "why not"],
    data.alternatives.map((a, i) => [a.label, num(a.time_s ? seconds(a.time_s) : "–"),
      num(a.time_s ? (i === 0 ? "chosen" : signed(a.time_s / best - 1)) : "–"),
      num(a.memory_bytes ? bytes(a.memory_bytes) : "–"), a.note])));
}

document.title = data.title;
document.getElementById("title").textContent = data.title;
document.getElementById("subtitle").textContent = data.subtitle;
verdict(); memory(); mesh(); timeline(); blocks(); alternatives();
at("notes").append(el("ul", {}, data.notes.map((n) => el("li", {}, n))));
document.body.dataset.ready = "yes";
