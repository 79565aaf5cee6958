// The status page: fetches /status every two seconds and draws it. It uses no library and loads nothing from elsewhere.
// Strings of peers reach the document through textContent or setAttribute, never as markup.
"use strict";

const POLL_MS = 2000;
const STALE_MS = 7000;
const POINTS = 360;
const OLD_STEPS = 10; // age at which a held-out reward is called old

// --- helpers ---------------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "g", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

// Replace the children of an element, unless they are equal: a selection of the user stays.
function put(element, ...children) {
  const there = element.childNodes;
  if (there.length !== children.length || children.some((child, i) => !child.isEqualNode(there[i]))) element.replaceChildren(...children);
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const shortId = (peer) => (peer.length > 18 ? `${peer.slice(0, 8)}…${peer.slice(-6)}` : peer);
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function count(value) {
  if (!known(value)) return "–";
  if (Math.abs(value) < 10000) return String(Math.round(value));
  if (Math.abs(value) < 1e6) return `${(value / 1e3).toFixed(1)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}
const fixed = (digits) => (value) => (known(value) ? value.toFixed(digits) : "–");

function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 1) return "under 1 s";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

const since = (seconds) => (!known(seconds) ? "–" : seconds < 1 ? "now" : `${duration(seconds)} ago`);

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (Math.abs(value) >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
  return `${i ? value.toFixed(1) : Math.round(value)} ${units[i]}`;
}

// --- numbers over time -----------------------------------------------------------------------------------------------

// Exponential moving average; gaps stay gaps.
function smooth(values) {
  const keep = Math.max(0, 1 - 20 / Math.max(20, values.length));
  let mean = null;
  return values.map((value) => {
    if (!known(value)) return null;
    mean = mean === null ? value : keep * mean + (1 - keep) * value;
    return mean;
  });
}

const scaled = (values, scale) => (scale ? values.map((value) => (known(value) ? value / scale : null)) : values);

// True if nothing was measured for a long time before point i, because the node was down.
const isGap = (at, i) => i > 0 && at[i] - at[i - 1] > 6 * ((at[at.length - 1] - at[0]) / (at.length - 1));

// Totals to amounts per minute in at most `bins` equal spans. A total falls when its process restarts.
function perMinute(at, totals, bins) {
  const start = at[0], span = (at[at.length - 1] - start) / bins;
  const rates = new Array(bins).fill(0);
  for (let i = 1; i < at.length; i += 1) {
    const bin = Math.min(bins - 1, Math.floor((at[i] - start) / span - 1e-9));
    if (known(totals[i]) && known(totals[i - 1]) && !isGap(at, i)) rates[Math.max(0, bin)] += Math.max(0, totals[i] - totals[i - 1]) * (60 / span);
  }
  return rates;
}

// Points at which a known value differs from the last known one.
function changes(values) {
  let last = null;
  return values.flatMap((value, i) => {
    if (!known(value)) return [];
    const differs = last !== null && value !== last;
    last = value;
    return differs ? [i] : [];
  });
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.round(at / step) * step);
  return found;
}

// Number on an axis, at most six characters.
function plain(value) {
  const [scale, unit] = Math.abs(value) >= 1e6 ? [1e6, " M"] : Math.abs(value) >= 1e4 ? [1e3, " k"] : [1, ""];
  return `${+(value / scale).toPrecision(6)}${unit}`;
}

// --- one chart -------------------------------------------------------------------------------------------------------

const TIME_STEPS = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const LEFT = 44, RIGHT = 6, TOP = 6, BOTTOM = 20;

class Chart {
  // options: title, height, wide, format, max (upper limit of the axis), integer, stacked, scale (divisor of the values),
  //          mark (column; a vertical line where its value changes),
  //          optional (hidden without values), series: [{key, label, look, smooth, area, error}]; error: column with the
  //          standard error of key, drawn as a band
  constructor(options) {
    this.options = options;
    this.chosen = null;
    this.svg = node("svg", { role: "img", tabindex: "0", height: options.height });
    this.caption = node("figcaption");
    this.figure = node("figure", options.wide ? { class: "wide" } : {}, this.caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // empty: text if nothing was measured; recent: means over the last steps by key, for the caption
  show(at, columns, empty, recent) {
    const { stacked, series, scale, optional } = this.options;
    this.recent = series.map(({ key }) => recent[key]);
    this.marks = changes(columns[this.options.mark] || []);
    this.figure.hidden = Boolean(optional) && !series.some(({ key }) => (columns[key] || []).some(known));
    this.errors = series.map(({ error }) => columns[error] || []);
    this.at = at;
    this.empty = empty;
    this.values = series.map(({ key }) => scaled(columns[key] || [], scale));
    this.bins = 0;
    if (stacked) {
      this.bins = Math.max(0, Math.min(60, at.length - 1));
      this.values = this.values.map((totals) => (this.bins ? perMinute(at, totals, this.bins) : [null]));
    }
    this.draw();
  }

  get length() { return this.bins || this.at.length; }

  point(x) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    if (!this.at || this.at.length < 2) return;
    if (this.bins) { this.choose(Math.floor(share * this.bins)); return; }
    const time = this.at[0] + share * (this.at[this.at.length - 1] - this.at[0]);
    let best = 0;
    this.at.forEach((t, i) => { if (Math.abs(t - time) < Math.abs(this.at[best] - time)) best = i; });
    this.choose(best);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.choose(null);
    if (!(event.key in moves) || !this.at) return;
    event.preventDefault();
    this.choose((this.chosen === null ? this.length - 1 : this.chosen) + moves[event.key]);
  }

  choose(index) {
    this.chosen = index === null ? null : Math.max(0, Math.min(this.length - 1, index));
    if (this.at) this.draw();
  }

  draw() {
    const { title, height, series, format, stacked } = this.options;
    const { at, values } = this;
    this.width = Math.max(160, this.svg.clientWidth || this.figure.clientWidth - 34);
    const bottom = height - BOTTOM, right = this.width - RIGHT;
    const index = this.chosen === null ? this.length - 1 : Math.min(this.chosen, this.length - 1);

    const when = this.bins ? at[0] + ((index + 0.5) / this.bins) * (at[at.length - 1] - at[0]) : at[index];
    const ago = this.chosen === null ? "" : ` · ${since(at[at.length - 1] - when)}`;
    const read = (i) => (this.chosen === null && known(this.recent[i]) ? this.recent[i] : values[i][index]);
    this.caption.replaceChildren(node("span", { class: "title" }, title, node("span", { class: "muted" }, ago)));
    this.caption.append(node("span", { class: series.length > 1 ? "keys row" : "keys" }, ...series.map(({ label, look }, i) => (
      node("span", { class: stacked ? "key box" : "key" }, node("i", { class: look }), label ? `${label} ` : "", node("b", {}, format(read(i))))))));
    const valuesText = series.map(({ label }, i) => `${label} ${format(read(i))}`).join(", ");
    this.svg.setAttribute("aria-label", `${title}: ${valuesText}${ago}`);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);

    const shown = values.flat().filter(known);
    const silent = stacked && shown.every((value) => value === 0);
    if (at.length < 2 || !shown.length || silent) {
      this.svg.replaceChildren(node("text", { x: this.width / 2, y: height / 2, "text-anchor": "middle" },
        silent ? "none yet" : shown.length ? "just started" : this.empty));
      return;
    }
    const [low, high] = this.range(shown);
    const x = (time) => LEFT + ((time - at[0]) / (at[at.length - 1] - at[0] || 1)) * (right - LEFT);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - TOP);
    const parts = this.axes(low, high, x, y, bottom, right);
    for (const i of this.marks) {
      parts.push(node("line", { class: "mark", x1: x(at[i]), x2: x(at[i]), y1: TOP, y2: bottom },
        node("title", {}, "other tasks or another manifest: values before and after are not comparable")));
    }
    if (stacked) parts.push(...this.blocks(y, right));
    else {
      series.forEach((one, i) => parts.push(...this.band(one, values[i], this.errors[i], x, (value) => y(Math.min(high, Math.max(low, value))))));
      series.forEach((one, i) => parts.push(...this.line(one, values[i], x, y, bottom)));
    }
    if (this.chosen !== null) {
      const across = this.bins ? LEFT + ((index + 0.5) / this.bins) * (right - LEFT) : x(at[index]);
      parts.push(node("line", { class: "cursor", x1: across, x2: across, y1: TOP, y2: bottom }));
    }
    this.svg.replaceChildren(...parts);
  }

  range(shown) {
    const { max, stacked, integer } = this.options;
    let top = Math.max(...shown);
    if (stacked) top = Math.max(...this.values[0].map((_, i) => this.values.reduce((total, column) => total + column[i], 0)));
    top *= 1.08;
    if (max !== undefined) top = Math.min(max, top);
    if (integer) top = Math.max(2, top);
    return [0, top > 0 ? top : 1];
  }

  axes(low, high, x, y, bottom, right) {
    const parts = [];
    for (const value of ticks(low, high, this.options.height > 160 || this.options.integer ? 4 : 3)) {
      if (this.options.integer && value % 1) continue;
      parts.push(node("line", { class: value === 0 ? "gridline base" : "gridline", x1: LEFT, x2: right, y1: y(value), y2: y(value) }));
      parts.push(node("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, plain(value)));
    }
    const { at } = this;
    const now = at[at.length - 1], span = now - at[0];
    const step = TIME_STEPS.find((seconds) => span / seconds <= (this.width > 420 ? 4.5 : 2.5)) || span;
    parts.push(node("text", { x: right, y: bottom + 15, "text-anchor": "end" }, "now"));
    for (let ago = step; ago <= span; ago += step) {
      const across = x(now - ago);
      parts.push(node("text", { x: across, y: bottom + 15, "text-anchor": across < LEFT + 24 ? "start" : "middle" }, `−${duration(ago)}`));
    }
    return parts;
  }

  // One standard error to each side; a separate shape for each run of measurements.
  band(one, column, errors, x, y) {
    const pieces = [];
    let piece = null;
    column.forEach((value, i) => {
      if (isGap(this.at, i) || !known(value) || !known(errors[i])) piece = null;
      if (!known(value) || !known(errors[i])) return;
      if (!piece) pieces.push(piece = { over: [], under: [] });
      const across = x(this.at[i]).toFixed(1);
      piece.over.push(`${across} ${y(value + errors[i]).toFixed(1)}`);
      piece.under.unshift(`${across} ${y(value - errors[i]).toFixed(1)}`);
    });
    return pieces.map(({ over, under }) => node("path", { class: `area band ${one.look}`, d: `M${[...over, ...under].join("L")}Z`, "data-band": one.key }));
  }

  line(one, column, x, y, bottom) {
    const path = (values) => {
      let d = "", pen = "M";
      values.forEach((value, i) => {
        if (isGap(this.at, i)) pen = "M";
        if (!known(value)) { pen = "M"; return; }
        d += `${pen}${x(this.at[i]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      return d;
    };
    const parts = [];
    const d = path(one.smooth ? smooth(column) : column);
    if (one.area && d.indexOf("M", 1) < 0) {
      const first = column.findIndex(known);
      parts.push(node("path", { class: `area ${one.look}`, d: `${d}L${x(this.at[this.at.length - 1])} ${bottom}L${x(this.at[first])} ${bottom}Z` }));
    }
    if (one.smooth) parts.push(node("path", { class: `line raw ${one.look}`, d: path(column) }));
    parts.push(node("path", { class: `line ${one.look}`, d, "data-series": one.key }));
    return parts;
  }

  blocks(y, right) {
    const parts = [];
    const width = (right - LEFT) / this.bins;
    const gap = width > 5 ? 1.5 : 0;
    for (let i = 0; i < this.bins; i += 1) {
      let under = 0;
      this.options.series.forEach((one, k) => {
        const over = under + this.values[k][i];
        const tall = y(under) - y(over);
        if (tall > 0) {
          parts.push(node("rect", { class: `block ${one.look}`, x: (LEFT + i * width).toFixed(2), y: y(over).toFixed(2),
            width: (width - gap).toFixed(2), height: tall.toFixed(2), "data-series": one.key }));
        }
        under = over;
      });
    }
    return parts;
  }
}

const CHARTS = [
  new Chart({ title: "Reward", height: 220, wide: true, format: fixed(3), max: 1, mark: "terms", series: [
    { key: "reward_own", label: "own", look: "own", smooth: true },
    { key: "reward_external", label: "peers'", look: "external", smooth: true },
    { key: "reward_held_out", label: "held-out", look: "held-out", error: "reward_held_out_error" },
  ] }),
  new Chart({ title: "Groups from peers per minute", height: 220, wide: true, stacked: true, format: count, series: [
    { key: "admitted", label: "admitted", look: "admitted" },
    { key: "ignored", label: "ignored", look: "ignored" },
    { key: "rejected", label: "rejected", look: "rejected" },
  ] }),
  new Chart({ title: "Completion tokens", height: 130, format: fixed(1), series: [
    { key: "completion_tokens", label: "mean", look: "own", smooth: true },
    { key: "completion_tokens_p95", label: "p95", look: "external" },
  ] }),
  new Chart({ title: "Share, 0 to 1", height: 130, format: fixed(2), max: 1, series: [
    { key: "completion_cut_share", label: "completions cut", look: "external", smooth: true },
    { key: "zero_advantage_share", label: "no advantage", look: "plain", smooth: true },
  ] }),
  new Chart({ title: "Entropy, nats", height: 130, format: fixed(2), series: [{ key: "entropy", label: "", look: "own", smooth: true }] }),
  new Chart({ title: "Gradient norm", height: 130, format: fixed(3), series: [{ key: "grad_norm", label: "", look: "own", smooth: true }] }),
  new Chart({ title: "Tokens per second", height: 130, format: count, series: [{ key: "tokens_per_second", label: "", look: "external", smooth: true }] }),
  new Chart({ title: "Peers", height: 130, integer: true, format: count, series: [{ key: "peers", label: "", look: "own", area: true }] }),
  new Chart({ title: "Policy version", height: 130, integer: true, format: count,
    series: [{ key: "policy_version", label: "", look: "plain", area: true }] }),
  new Chart({ title: "Step seconds", height: 130, format: fixed(2),
    series: [{ key: "step_seconds", label: "", look: "external", smooth: true }] }),
  new Chart({ title: "Network, KiB per minute", height: 130, stacked: true, scale: 1024, format: count, series: [
    { key: "bytes_in", label: "received", look: "own" },
    { key: "bytes_out", label: "sent", look: "external" },
  ] }),
  new Chart({ title: "Memory, MiB", height: 130, scale: 2 ** 20, format: count, series: [
    { key: "memory_network", label: "network", look: "own" },
    { key: "memory_trainer", label: "trainer", look: "external" },
  ] }),
  new Chart({ title: "CPU, seconds per minute", height: 130, stacked: true, format: fixed(1), series: [
    { key: "cpu_network", label: "network", look: "own" },
    { key: "cpu_trainer", label: "trainer", look: "external" },
  ] }),
];

// --- all other parts of the page ---------------------------------------------------------------------------------------

function tile(label, value, unit, note) {
  const shown = node("p", { class: "value" }, value);
  if (unit) shown.append(node("span", { class: "unit" }, unit));
  return node("div", { class: "tile" }, node("p", { class: "label" }, label), shown, node("p", { class: "note" }, note || ""));
}

// In a crew, only the head samples, trains and evaluates.
const leads = (s) => !s.stages.enabled || s.stages.crew.stage === 0;
const waits = (own) => (own && known(own.bubble_share) ? `waiting ${Math.round(100 * own.bubble_share)} % of a step` : "");

function tiles(s) {
  const { rollouts, network } = s, { crew: c, own } = s.stages, member = !leads(s), report = (!member && s.trainer.report) || {};
  const { recent } = s.trainer, there = s.trainer.connected;
  const gained = known(report.reward_held_out) && known(report.reward_held_out_start) ? report.reward_held_out - report.reward_held_out_start : null;
  const error = known(report.reward_held_out_error) ? `±${report.reward_held_out_error.toFixed(3)}` : "";
  const behind = known(report.reward_held_out_step) ? report.step - report.reward_held_out_step : 0;
  const evaluated = member ? "measured by the crew's head" : gained === null ? "not evaluated yet" : [
    `${gained < 0 ? "−" : "+"}${Math.abs(gained).toFixed(3)} since the start`,
    known(report.reward_held_out_step) ? `at step ${count(report.reward_held_out_step)}` : "",
    behind >= OLD_STEPS ? `${count(behind)} steps old` : "",
  ].filter(Boolean).join(", ");
  const left = report.max_steps && known(recent.interval_seconds) ? (report.max_steps - report.step) * recent.interval_seconds : 0;
  const pace = [known(recent.step_seconds) ? `${fixed(2)(recent.step_seconds)} s per step` : "", left > 0 ? `${duration(left)} left` : ""].filter(Boolean).join(", ");
  put(byId("tiles"),
    tile("Held-out reward", fixed(3)(report.reward_held_out), error, evaluated),
    tile("Used from peers", count(rollouts.judged.used || 0), "groups", `of ${count(rollouts.admission.admitted)} admitted`),
    tile("Peers", count(network.peers.connected), "", `${network.peers.known} known, ${count(rollouts.pulling.polled)} polled`),
    member ? tile("Steps of the stage", own ? count(own.step) : "–", "", known(c.stage) ? `stage ${c.stage}, the first is 0` : "holds no stage")
      : tile("Step", count(report.step), report.max_steps ? `of ${count(report.max_steps)}` : "", there ? pace : ""),
    member ? tile("Through the stage", count(own ? own.tokens_per_second : null), "tokens/s", waits(own))
      : tile("Sampling", there ? count(recent.tokens_per_second) : "–", "tokens/s", !there ? doing(s) : known(report.external_share) ? `${Math.round(report.external_share * 100)} % of the groups from peers` : ""),
    tile("Pool", count(rollouts.pool.groups), "groups", `${bytes(rollouts.pool.bytes)}, ${rollouts.pool.peers} peers`),
  );
}

// What the trainer does now.
function doing(s) {
  if (!s.trainer.connected) return s.supervisor.loading.trainer || "no trainer";
  if (!leads(s)) return (s.stages.own || {}).phase || "";
  return (s.trainer.report || {}).activity || (s.trainer.report || {}).phase || "";
}

const PAUSES = ["owner", "quiet_hours"]; // reasons to stop training

function head(answer) {
  const s = answer.snapshot, report = s.trainer.report || {};
  const { node: me } = s;
  const title = me.name || me.swarm_name || shortId(me.peer);
  byId("name").textContent = title || "swarmnode";
  document.title = `${title} · swarmnode`;
  const facts = [`swarm ${me.swarm_name}`, me.model, [report.device, report.dtype].filter(Boolean).join(" "), `up ${duration(Math.max(0, s.at - me.started_at))}`, `v${me.version}`];
  byId("facts").textContent = facts.filter(Boolean).join("  ·  ");
  byId("phase").textContent = me.trainer ? doing(s) : "";
  const paused = PAUSES.some((why) => s.budget.paused[why]);
  const state = s.health.draining ? "draining" : !answer.ready.ok ? "starting" : paused ? "paused" : answer.troubles.length ? "degraded" : "ready";
  announce(state, [...answer.ready.reasons, ...answer.troubles].join("; "));
}

function announce(state, why) {
  document.body.dataset.state = state;
  const words = { ready: "ready", starting: "starting", draining: "draining", degraded: "needs a look", paused: "paused", stale: "not answering" };
  if (byId("state").textContent !== words[state]) byId("state").textContent = words[state];
  byId("notice").hidden = !why;
  if (byId("notice").textContent !== why) byId("notice").textContent = why;
}

const cell = (label, value, kind = "number") => node("td", { "data-label": label, class: kind }, value);

// Names that peers claim. Any peer may claim a name, so the id is always shown too.
const namesOf = (s) => new Map(s.swarm.rows.filter((row) => row.name).map((row) => [row.peer, row.name]));

function peers(rows, names) {
  const order = [...rows].sort((a, b) => !a.direction - !b.direction || b.used - a.used || a.peer.localeCompare(b.peer));
  put(byId("peers").tBodies[0], ...order.map((row) => {
    const id = node("code", { title: row.peer }, shortId(row.peer));
    const name = names.get(row.peer);
    return node("tr", row.direction ? {} : { class: "gone" },
      cell("Peer", name ? node("span", {}, node("bdi", {}, name), " ", id) : id, ""), cell("Link", row.direction || "none", ""), cell("Admitted", count(row.admitted)), cell("Used", count(row.used)),
      cell("Rejected", count(row.rejected), row.rejected ? "number low" : "number"),
      cell("Reputation", row.reputation.toFixed(2), row.reputation < 0 ? "number low" : "number"), cell("Seen", since(row.last_seen_seconds)));
  }));
  byId("peers").hidden = !rows.length;
  byId("no-peers").hidden = rows.length > 0;
}

function swarm(s) {
  const rows = s.swarm.rows;
  const median = known(s.swarm.reward_median) ? `; the median of their held-out rewards is ${s.swarm.reward_median.toFixed(3)}` : "";
  const more = s.swarm.reporting > rows.length ? `, ${rows.length} of them shown` : "";
  byId("swarm-line").textContent = rows.length
    ? `${s.swarm.reporting} ${s.swarm.reporting === 1 ? "node" : "nodes"} with a recent summary${more}${median}.`
    : "No summaries yet. Peers that share a summary send it within a minute.";
  put(byId("swarm").tBodies[0], ...rows.map((row) => node("tr", row.direct ? {} : { class: "gone" },
    cell("Name", node("bdi", {}, row.name || "–"), "named"),
    cell("Peer", node("code", { title: row.direct ? row.peer : `${row.peer}, received through another peer` }, shortId(row.peer)), ""),
    cell("Version", row.version, ""), cell("Policy", count(row.policy_version)), cell("Steps", count(row.step)),
    cell("Held-out", known(row.reward) ? `${fixed(3)(row.reward)} at step ${count(row.reward_step)}` : "–"),
    cell("Published", count(row.published)), cell("Peers", count(row.peers)), cell("Up", duration(row.uptime_seconds)),
    cell("Age", since(row.age_seconds)))));
  byId("swarm").hidden = !rows.length;
}

function facts(list, rows) {
  put(byId(list), ...rows.filter(([, value]) => value).flatMap(([name, value]) => [node("dt", {}, name), node("dd", {}, value)]));
}

function bars(list, all) {
  const most = Math.max(1, ...all.map(([, n]) => n));
  put(byId(list), ...all.map(([name, n, look, note]) => node("li", {},
    node("span", {}, name.replaceAll("_", " "), node("span", { class: "muted" }, ` ${note}`)), node("span", {}, count(n)),
    node("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
      node("rect", { class: `block ${look}`, width: (100 * n) / most, height: 4 })))));
}

const DONE = ["applied", "solo"], NO_PARTNER = ["busy", "refused", "unreachable"];

function weights(s) {
  const { weights: w } = s, report = (s.trainer.report || {}).weights || {};
  const finished = w.outcomes.applied || 0;
  const partners = Object.entries(w.pairs).sort((a, b) => b[1] - a[1]).slice(0, 4).map(([peer, n]) => `${shortId(peer)} ${count(n)}×`);
  facts("weights", !w.enabled ? [] : [
    ["state", w.phase === "idle" ? "" : w.phase],
    ["outer steps", known(report.outer_step) ? `${count(report.outer_step)}, ${count(report.fragments)} fragments` : ""],
    ["partners", `${count(w.candidates)} available${partners.length ? "; " : ""}${partners.join(", ")}`],
    ["last partner", known(report.distance) ? `distance ${(100 * report.distance).toFixed(1)} %` : ""],
    ["exchanges", finished ? `${(w.exchange_seconds / finished).toFixed(2)} s each, ${bytes(w.received_bytes)} received` : ""],
    ["gate", Object.entries(w.judged).filter(([, n]) => n > 0).map(([outcome, n]) => `${outcome.replaceAll("_", " ")} ${count(n)}`).join(", ")],
  ]);
  const look = (outcome) => (DONE.includes(outcome) ? ["admitted", "done"] : NO_PARTNER.includes(outcome) ? ["ignored", "no partner"] : ["rejected", "no effect"]);
  bars("exchanges", !w.enabled ? [] : Object.entries(w.outcomes).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]).slice(0, 8)
    .map(([outcome, n]) => [outcome, n, ...look(outcome)]));
  byId("no-weights").hidden = w.enabled;
}

const SLOT_LOOKS = { active: "good", loading: "warn", failed: "bad" };
const CREW_WORDS = { none: "In no crew", forming: "Forming", preparing: "Preparing", running: "Running" };
const SOURCE_WORDS = { memory: "memory", checkpoint: "its own checkpoint", neighbour: "another member's checkpoint", base: "the base model",
  checkfree: "an average of its neighbours (CheckFree)", "checkfree+": "a copy of its neighbour (CheckFree+)" };

function crew(s) {
  const { stages } = s, { crew: c, own, streams } = stages, last = c.slots.length - 1;
  byId("crew-card").hidden = !stages.enabled;
  const names = namesOf(s);
  const others = c.offers === 1 ? "1 other node offers" : `${c.offers} other nodes offer`;
  byId("crew-line").textContent = [
    CREW_WORDS[c.state] || c.state, c.stopped_seconds > 1 ? `no step for ${duration(c.stopped_seconds)}` : "",
    `${others} to hold a stage`, c.slots.length ? "" : stages.last_reason,
  ].filter(Boolean).join("; ") + ".";
  put(byId("crew"), ...c.slots.map((slot) => {
    const mine = slot.peer && slot.peer === s.node.peer;
    const id = node("code", { title: slot.peer }, shortId(slot.peer)); // shown with the name, which any peer may claim
    const who = !slot.peer ? [node("span", { class: "muted" }, "none")]
      : mine ? [node("b", {}, "this node")] : names.get(slot.peer) ? [node("bdi", {}, names.get(slot.peer)), " ", id] : [id];
    const role = last === 0 ? "" : slot.stage === 0 ? " · head" : slot.stage === last ? " · last" : "";
    return node("li", { class: SLOT_LOOKS[slot.state] || "", "data-stage": slot.stage },
      node("p", { class: "label" }, `Stage ${slot.stage}${role}`), node("p", { class: "holder" }, ...who),
      node("p", { class: "slot" }, slot.state),
      node("p", { class: "note" }, [known(slot.layers) ? `${slot.layers} ${slot.layers === 1 ? "layer" : "layers"}` : "", `step ${count(slot.step)}`].filter(Boolean).join(", ")));
  }));
  const events = (...kinds) => kinds.map((kind) => [kind, stages.events[kind] || 0]).filter(([, n]) => n).map(([kind, n]) => `${kind} ${count(n)}`).join(", ");
  facts("crew-facts", !c.slots.length ? [] : [
    ["crew", c.id ? `${c.id.slice(0, 16)}…` : ""],
    ["last recovery", known(c.recovery_seconds) ? `${c.recovery_seconds.toFixed(1)} s` : "none yet"],
    ["ended and struck", events("broken", "struck") || "never"],
    ["between stages", byProtocol(streams).map(([kind, received, sent]) => `${kind} ${bytes(received)} in, ${bytes(sent)} out`).join("; ")],
    ["dropped", Object.entries(own ? own.dropped : {}).filter(([, n]) => n).map(([reason, n]) => `${reason.replaceAll("_", " ")} ${count(n)}`).join(", ")],
  ]);
  facts("stage-facts", !known(c.stage) ? [] : [
    ["this node's stage", own ? `${c.stage}, ${own.phase}, step ${count(own.step)}` : `${c.stage}, not loaded yet`],
    ...(own ? [
      ["restored from", own.source ? `${SOURCE_WORDS[own.source] || own.source}${known(own.source_seconds) ? `, in ${own.source_seconds.toFixed(1)} s` : ""}` : ""],
      ["newest checkpoint at a neighbour", known(own.checkpoint_step) ? `of step ${count(own.checkpoint_step)}, ${count(own.checkpoint_age_steps)} steps old` : c.slots.length > 1 ? "none yet" : ""],
      ["samples from", known(own.copy_age_steps) ? `a policy copy, ${count(own.copy_age_steps)} steps old${known(own.copy_bytes) ? `, last refresh ${bytes(own.copy_bytes)}` : ""}` : ""],
      ["speed", [known(own.tokens_per_second) ? `${count(own.tokens_per_second)} tokens/s` : "", waits(own)].filter(Boolean).join(", ")],
      ["failed", own.phase === "failed" ? own.reason : ""],
    ] : []),
  ]);
}

// [protocol, bytes received, bytes sent]
const byProtocol = ({ received, sent }) => [...new Set([...Object.keys(received), ...Object.keys(sent)])]
  .map((protocol) => [protocol, received[protocol] || 0, sent[protocol] || 0]);

// The engine that samples, and the state of the inference server if one is configured.
function sampledBy({ engine, server }) {
  if (!server) return engine ? `own engine, ${engine}` : "";
  const name = ["vLLM", server.version, server.model].filter(Boolean).join(" ");
  if (server.state === "sampling") return `${name} at ${server.url}, ${count(server.loads)} loads of weights, the last in ${duration(server.load_seconds)}`;
  return `own engine${engine ? `, ${engine}` : ""}: ${server.reason || `${name} at ${server.url} was not tried yet`}`;
}

function resources(s) {
  const { budget: b, disk, processes } = s;
  const used = (b.month_bytes.in || 0) + (b.month_bytes.out || 0);
  const paused = Object.keys(b.paused).filter((why) => b.paused[why]).map((why) => why.replaceAll("_", " "));
  const { device_memory_bytes: device, cards = [] } = s.trainer.report || {};
  const offset = s.swarm.clock_offset_seconds;
  facts("resources", [
    ...Object.entries(processes).map(([name, use]) => [name, `${bytes(use.memory_bytes)}, ${duration(use.cpu_seconds)} of CPU`]),
    ["device", known(device) ? `${bytes(device)} at peak` : ""],
    ["sampled by", sampledBy(s.trainer.report || {})],
    ...cards.map((card) => [card.device, `${card.name}, ${bytes(card.free_bytes)} of ${bytes(card.total_bytes)} free, ${bytes(card.held_bytes)} held by this node`]),
    ["disk", known(disk.free_bytes) ? `${bytes(disk.free_bytes)} free of ${bytes(disk.total_bytes)}` : ""],
    ["this month", used || b.month_limit_bytes ? `${bytes(used)}${b.month_limit_bytes ? ` of ${bytes(b.month_limit_bytes)}` : ""}` : ""],
    ["available now", Object.entries(b.level_bytes).map(([way, level]) => `${way} ${bytes(level)}`).join(", ")],
    ["sharing paused", paused.join(", ")],
    ["clock", known(offset) ? `${Math.abs(offset).toFixed(1)} s ${offset > 0 ? "behind" : "ahead of"} most peers'` : ""],
  ]);
  const traffic = byProtocol(s.network.traffic).sort((x, y) => y[1] + y[2] - x[1] - x[2]).slice(0, 8);
  put(byId("traffic").tBodies[0], ...traffic.map(([protocol, received, sent]) => node("tr", {},
    cell("Protocol", node("code", {}, protocol), ""), cell("Received", bytes(received)), cell("Sent", bytes(sent)))));
  byId("traffic").hidden = !traffic.length;
  byId("no-traffic").hidden = traffic.length > 0;
}

// Own groups that were not shared, counted in the trainer and in the network process.
function ownDrops(s) {
  const { drops = {} } = s.trainer.report || {};
  return [...Object.entries((drops.group || {}).dropped || {}), ...Object.entries(s.rollouts.unpublished)]
    .filter(([reason]) => reason !== "zero_advantage" && reason !== "disabled");
}

function reasons(s) {
  const { rollouts } = s;
  const all = [
    ...Object.entries(rollouts.admission.rejected).map(([reason, n]) => [reason, n, "rejected"]),
    ...Object.entries(rollouts.admission.ignored).map(([reason, n]) => [reason, n, "ignored"]),
    ...ownDrops(s).map(([reason, n]) => [reason, n, "ignored", "own, not shared"]),
    ...Object.entries(rollouts.judged).filter(([outcome]) => outcome !== "used").map(([outcome, n]) => [outcome, n, "ignored", "by the trainer"]),
  ].filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]).slice(0, 8);
  bars("reasons", all.map(([reason, n, look, note]) => [reason, n, look, note || look]));
  byId("no-reasons").hidden = all.length > 0;
}

function gained({ gained: g, node: me }) {
  byId("gained-card").hidden = !me.trainer || !me.sharing;
  facts("gained", [
    ["given", g.given_to ? `${count(g.given)} groups of this node, used by ${g.given_to} ${g.given_to === 1 ? "peer" : "peers"}, as they report` : "nothing that a peer reports to have used"],
    ["gained", `${count(g.used)} groups of peers, used in training`],
    ["saved", g.tokens_saved ? `about ${count(g.tokens_saved)} own tokens: groups of peers × mean tokens of an own group` : ""],
  ]);
}

const REACH_WORDS = { public: "by strangers", private: "only through relays", unknown: "not known yet" };

function reach(network) {
  const { reach: found, relay, client, punch, relayed } = network.nat;
  const punches = Object.entries(punch).filter(([, n]) => n > 0).map(([outcome, n]) => `${outcome} ${count(n)}`).join(", ");
  const carries = relay.circuits || relay.bytes;
  facts("reach", [
    ["can be dialled", found.verdict === "public" && found.local ? "by peers in the local network" : REACH_WORDS[found.verdict] || found.verdict],
    ["relays", client.relays.length ? `reachable through ${count(client.relays.length)}` : ""],
    ["peers by relay", relayed ? count(relayed) : ""],
    ["hole punches", punches],
    ["carries for others", carries ? `${count(relay.circuits)} circuits, ${bytes(relay.bytes)} so far` : ""],
  ]);
}

function identity(me) {
  const rows = [["peer", me.peer], ["swarm", me.swarm ? `${me.swarm.slice(0, 16)}…` : ""], ["address", me.addrs[0] || ""], ["invite", me.invite || ""], ["tasks", me.tasks.join(", ")]];
  put(byId("identity"), ...rows.filter(([, value]) => value).flatMap(([name, value]) => [
    node("dt", {}, name), node("dd", {}, node("code", {}, value)),
  ]));
}

function logs(list, lines) {
  byId(list).hidden = !lines.length;
  put(byId(list), ...[...lines].reverse().slice(0, 200).map((line) => node("li", {},
    node("time", { class: "muted", datetime: new Date(line.at * 1000).toISOString() }, new Date(line.at * 1000).toLocaleTimeString([], { hour12: false })),
    node("span", { class: /^[a-z]+$/.test(line.level) ? line.level : "" }, line.level),
    node("span", { class: "muted process" }, line.process), node("span", { class: "text", title: line.logger }, line.text))));
}

// Texts from /samples have no invisible characters, and are shown in separate boxes.
function answer(one) {
  const measured = [known(one.reward) ? `reward ${fixed(2)(one.reward)}` : "", ...Object.entries(one.components || {}).map(([name, value]) => `${name} ${fixed(2)(value)}`),
    known(one.surprise) ? `surprise ${fixed(2)(one.surprise)}` : "", one.turns && one.turns.length ? "episode" : "", `${count(one.tokens)} tokens${one.finish === "length" ? ", cut" : ""}`];
  const turns = (one.turns || []).flatMap((turn) => [
    ...(turn.action ? [node("pre", { class: "action", dir: "auto" }, turn.action)] : []),
    ...(turn.observation ? [node("pre", { class: "observation", dir: "auto" }, turn.observation)] : [])]);
  return node("div", { class: "answer" }, node("p", { class: "muted" }, node("bdi", {}, measured.filter(Boolean).join("  ·  "))),
    ...(turns.length ? turns : [node("pre", { dir: "auto" }, one.text)]));
}

function samples(found, names) {
  byId("samples-line").textContent = found.length
    ? "Newest first: groups of this node, and groups of peers that it trained on or refused. Surprise is in nats per token, under this node's policy."
    : "No answers yet.";
  put(byId("samples"), ...found.map((sample) => {
    const name = names.get(sample.peer);
    const who = sample.peer ? [...(name ? [node("bdi", {}, name), " "] : []), node("code", { title: sample.peer }, shortId(sample.peer))] : [sample.held_out ? "own, held out" : "own"];
    const refused = sample.outcome && sample.outcome !== "used" ? [node("span", { class: "low" }, ` refused: ${sample.outcome.replaceAll("_", " ")}${sample.detail ? `, ${sample.detail}` : ""}`)] : [];
    return node("li", { "data-peer": sample.peer || "" },
      node("p", {}, ...who, ...refused, node("span", { class: "muted" }, `  ·  ${sample.task}  ·  step ${count(sample.step)}, policy version ${count(sample.policy_version)}`)),
      node("pre", { class: "question", dir: "auto" }, sample.prompt), ...sample.completions.map(answer));
  }));
  byId("samples").hidden = !found.length;
}

// --- polling ---------------------------------------------------------------------------------------------------------

let answeredAt = null, shownAt = performance.now(), timer = null, misread = false;

// Return the body of /status, or null without a valid answer.
async function ask() {
  try {
    const answer = await fetch(`/status?points=${POINTS}`, { signal: AbortSignal.timeout(STALE_MS) });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null; // the node is down or slow; watchAge shows it
  }
}

let sampled; // step of the shown answers

// Answers change with each step. They are larger than the rest, so they are fetched only then.
async function askSamples(s) {
  const step = s.trainer.report ? s.trainer.report.step : null;
  if (step === sampled) return;
  try {
    const answer = await fetch("/samples", { signal: AbortSignal.timeout(STALE_MS) });
    if (!answer.ok) return;
    samples(await answer.json(), namesOf(s));
    sampled = step;
  } catch (error) {
    if (!["AbortError", "TimeoutError", "TypeError"].includes(error.name)) console.error(error); // the next poll tries again
  }
}

function render(answer) {
  const s = answer.snapshot;
  head(answer);
  tiles(s);
  const empty = leads(s) ? "nothing measured yet" : "measured by the crew's head";
  for (const chart of CHARTS) chart.show(answer.history.at, answer.history, empty, s.trainer.connected ? s.trainer.recent : {});
  crew(s);
  peers(s.peers, namesOf(s));
  reasons(s);
  swarm(s);
  weights(s);
  resources(s);
  identity(s.node);
  reach(s.network);
  gained(s);
  logs("warnings", s.warnings);
  byId("warnings-title").hidden = !s.warnings.length;
  logs("logs", s.logs);
}

async function poll() {
  clearTimeout(timer);
  const answer = await ask();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
  if (answer === null) return;
  try {
    render(answer);
    answeredAt = performance.now();
    misread = false;
  } catch (error) {
    misread = true; // the node has another version than this page
    console.error(error);
    watchAge();
    return;
  }
  await askSamples(answer.snapshot);
}

function watchAge() {
  if (document.hidden) return; // browsers slow down the timers of hidden pages
  const now = performance.now(), age = now - (answeredAt ?? shownAt), silent = now - Math.max(answeredAt ?? 0, shownAt);
  byId("age").textContent = answeredAt === null ? "" : `updated ${since(age / 1000)}`;
  if (misread) announce("stale", "The node has another version than this page: reload the page. It shows an earlier state.");
  else if (silent > STALE_MS) announce("stale", `The node has not answered for ${duration(age / 1000)}. The page shows its last state.`);
}

byId("charts").append(...CHARTS.map((chart) => chart.figure));
addEventListener("resize", () => { for (const chart of CHARTS) if (chart.at) chart.draw(); });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  shownAt = performance.now(); // a hidden page does not poll, so its silence does not count
  poll();
});
setInterval(watchAge, 1000);
poll();
