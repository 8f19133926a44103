/* The timeline: lanes of events on a canvas. Only what is in view is drawn, at most one block a pixel and lane. */
function timeline(data, still) {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const main = $("tl-main"), map = $("tl-map"), tip = $("tl-tip"), detail = $("tl-detail"), box = $("tl");
  const HEIGHT = { owner: 34, range: 20, loader: 18, host: 18, launch: 16, stream: 24, comm: 20, copy: 18 };
  const AXIS = 26, GAP = 3, MARK = 18, MIN_SPAN = 20, EDGE = 6;
  let view, lanes, marks, t0 = 0, t1 = 1, width = 0, gutter = 0, height = 0, colours = {}, hatch = null;
  let hover = null, picked = null, lane = 0, band = null, pending = 0, font = "12px sans-serif", small = font;

  function decode(raw) {
    return raw.lanes.map((r) => {
      const n = r.g.length, start = new Float64Array(n), end = new Float64Array(n), reach = new Float64Array(n);
      for (let i = 0, at = 0, far = 0; i < n; i++) {
        at += r.g[i]; start[i] = at; end[i] = at + r.l[i]; far = Math.max(far, end[i]); reach[i] = far;
      }
      return { label: r.label, kind: r.kind, detail: r.detail, name: r.n, count: r.c, start, end, reach, level: r.level };
    });
  }

  function show(index) {
    const raw = data.views[index];
    if (!raw.decoded) raw.decoded = decode(raw);
    view = raw; lanes = raw.decoded; marks = stack(raw.marks);
    t0 = 0; t1 = view.span; hover = picked = null; lane = 0;
    for (const b of document.querySelectorAll(".pick")) b.setAttribute("aria-pressed", String(Number(b.dataset.view) === index));
    measure();
    say(view.title + ", " + lanes.length + " lanes.");
  }

  /* What findings point at, in as few rows as do not overlap; the words of a mark need room too. */
  function stack(list) {
    const rows = [];
    return list.map((m) => ({ ...m, spans: m.spans || owned(m.parts) })).map((m) => ({ ...m, s: m.spans[0][0], e: m.spans[m.spans.length - 1][1] })).sort((a, b) => a.f - b.f || a.s - b.s).map((m) => {
      const end = Math.max(m.e, m.s + view.span * .2);
      let row = rows.findIndex((taken) => taken.every(([s, e]) => e <= m.s || s >= end));
      if (row < 0) { row = rows.length; rows.push([]); }
      rows[row].push([m.s, end]);
      return { ...m, row };
    });
  }

  /* Where the owners' lane holds these parts. */
  function owned(parts) {
    const l = lanes[0], spans = [];
    for (let i = 0; i < l.start.length; i++) {
      if (!parts.includes(l.name[i])) continue;
      const last = spans[spans.length - 1];
      if (last && last[1] >= l.start[i]) last[1] = l.end[i]; else spans.push([l.start[i], l.end[i]]);
    }
    return spans;
  }

  function measure() {
    const ratio = window.devicePixelRatio || 1;
    width = box.clientWidth; gutter = width > 720 ? 168 : 0;
    let y = AXIS + 1;
    if (marks.length) y += (Math.max(...marks.map((m) => m.row)) + 1) * MARK + 6;
    let kind = "";
    for (const l of lanes) {
      if (kind && l.kind !== kind) y += 5;
      if (!gutter && l.level === 0) y += 15;
      l.y = y; l.h = HEIGHT[l.kind] || 18; y += l.h + GAP; kind = l.kind;
    }
    height = y + 8;
    for (const [c, h] of [[main, height], [map, 28]]) {
      c.style.height = h + "px"; c.width = Math.round(width * ratio); c.height = Math.round(h * ratio);
      c.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    palette(); draw();
  }

  function palette() {
    const style = getComputedStyle(document.documentElement), v = (n) => style.getPropertyValue(n).trim();
    colours = { ink: v("--ink"), soft: v("--soft"), faint: v("--faint"), rule: v("--rule"), paper: v("--raised"), sunk: v("--sunk"), bad: v("--bad"), focus: v("--focus"),
      onDark: v("--on-dark"), onLight: v("--on-light"), range: [v("--t-range"), v("--t-range-2"), v("--t-range-3")], loader: v("--t-loader"), host: [v("--t-host"), v("--t-host-2")],
      launch: v("--t-launch"), sync: v("--t-sync"), stream: v("--t-stream"), comm: v("--t-comm"), copy: v("--t-copy"), memset: v("--t-memset") };
    const sans = v("--sans"); font = "12px " + sans; small = "11.5px " + sans;
    colours.of = {};
    const tile = document.createElement("canvas"); tile.width = tile.height = 8;
    const p = tile.getContext("2d"); p.strokeStyle = v("--hatch"); p.lineWidth = 2; p.beginPath();
    for (const o of [-8, 0, 8]) { p.moveTo(o, 8); p.lineTo(o + 8, 0); }
    p.stroke(); hatch = main.getContext("2d").createPattern(tile, "repeat");
    for (const part of data.parts) colours.of[part.name] = { fill: v("--p-" + part.css) || v("--p-other"), ink: part.light ? colours.onLight : colours.onDark, idle: part.idle };
  }

  const SYNC = /Synchronize|WaitEvent|EventQuery/;
  function look(l, i) {
    const name = view.names[l.name[i]];
    if (l.kind === "owner") return colours.of[name] || { fill: colours.faint, ink: colours.onDark };
    if (l.kind === "stream") return { fill: colours.stream, ink: colours.onDark, shade: tint(name) };
    if (l.kind === "comm") return { fill: colours.comm, ink: colours.onLight };
    if (l.kind === "copy") return { fill: /memset/i.test(name) ? colours.memset : colours.copy, ink: colours.onDark };
    if (l.kind === "launch") return { fill: SYNC.test(name) ? colours.sync : colours.launch, ink: colours.ink };
    if (l.kind === "loader") return { fill: colours.loader, ink: colours.ink };
    if (l.kind === "range") return { fill: colours.range[Math.min(l.level, 2)], ink: colours.ink };
    return { fill: colours.host[Math.min(l.level, 1)], ink: colours.ink };
  }
  /* The same kernel always has the same of five shades. */
  const shades = new Map();
  function tint(name) {
    let s = shades.get(name);
    if (s === undefined) { let h = 7; for (let i = 0; i < name.length; i++) h = (h * 31 + name.charCodeAt(i)) | 0; s = [0, .12, .24, -.1, -.2][Math.abs(h) % 5]; shades.set(name, s); }
    return s;
  }

  const x = (t) => gutter + EDGE + (t - t0) / (t1 - t0) * (width - gutter - 2 * EDGE);
  const time = (px) => t0 + (px - gutter - EDGE) / (width - gutter - 2 * EDGE) * (t1 - t0);

  /* First index whose reach lies beyond t: all before have ended. */
  function first(l, t) { let a = 0, b = l.reach.length; while (a < b) { const m = (a + b) >> 1; if (l.reach[m] > t) b = m; else a = m + 1; } return a; }

  function draw() {
    pending = 0;
    const began = performance.now(), c = main.getContext("2d");
    c.clearRect(0, 0, width, height); c.textBaseline = "middle";
    const left = gutter + EDGE, right = width - EDGE;
    axis(c, left, right);
    c.save(); c.beginPath(); c.rect(left, 0, right - left, height); c.clip();
    for (const m of marks) evidence(c, m);
    let drawn = 0;
    for (const l of lanes) drawn += blocks(c, l, left, right);
    if (picked) outline(c, picked.l, picked.i, colours.ink);
    if (hover && hover.l) outline(c, hover.l, hover.i, colours.soft);
    if (band) { c.fillStyle = colours.focus; c.globalAlpha = .16; c.fillRect(x(band[0]), 0, x(band[1]) - x(band[0]), height); c.globalAlpha = 1; }
    c.restore();
    c.font = font; c.textAlign = "left";
    let before = "";
    for (const l of lanes) {
      if (before && before !== l.kind) { c.fillStyle = colours.rule; c.fillRect(0, l.y - (gutter || l.level ? 5 : 20), width, 1); }
      before = l.kind;
      if (gutter || l.level === 0) { c.fillStyle = lanes[lane] === l && document.activeElement === main ? colours.ink : colours.soft; label(c, l.label, gutter ? 12 : 8, gutter ? l.y + l.h / 2 + .5 : l.y - 8, (gutter || width) - 16); }
    }
    if (gutter && marks.length) { c.fillStyle = colours.soft; c.fillText("Findings", 12, AXIS + 9); }
    overview();
    main.dataset.t0 = String(t0); main.dataset.t1 = String(t1); main.dataset.drawn = String(drawn); main.dataset.drawMs = (performance.now() - began).toFixed(2);
  }
  const later = () => { if (!pending) pending = requestAnimationFrame(draw); };

  function axis(c, left, right) {
    const rough = (t1 - t0) / Math.max(2, (right - left) / 110), power = 10 ** Math.floor(Math.log10(rough)), by = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
    c.font = small; c.textAlign = "center"; c.lineWidth = 1;
    for (let k = Math.ceil(t0 / by); k * by <= t1; k++) {
      const px = Math.round(x(k * by)) + .5;
      c.strokeStyle = colours.rule; c.beginPath(); c.moveTo(px, AXIS - 6); c.lineTo(px, height); c.stroke();
      c.fillStyle = colours.soft; c.textAlign = px - left < 24 ? "left" : right - px < 24 ? "right" : "center"; c.fillText(stamp(k * by, by), px, 11);
    }
  }

  function evidence(c, m) {
    const y = AXIS + 2 + m.row * MARK, left = gutter + EDGE;
    let from = -1, room = 0, last = -1, held = null;
    /* A run of short ones is one bar, as strong as it is full. */
    const put = ([a, b, full]) => {
      const strength = Math.min(1, full / (b - a));
      if (b - a > 4 && strength > .6) { c.globalAlpha = .06; c.fillRect(a, y, b - a, height - y); }
      c.globalAlpha = Math.max(.18, strength); c.fillRect(a, y + MARK - 4, b - a, 2); c.globalAlpha = 1;
      if (from < 0) from = Math.max(a, left);
      last = b;
    };
    c.fillStyle = colours.bad;
    for (const [s, e] of m.spans) {
      if (e < t0 || s > t1) continue;
      const a = x(s), b = Math.max(x(e), a + 1), full = x(e) - a, short = b - a < 5;
      if (held && held[3] && short && a - held[1] < 4) { held[1] = b; held[2] += full; continue; }
      if (held) put(held);
      held = [a, b, full, short];
    }
    if (held) put(held);
    if (from < 0) return;
    room = Math.max(last - from, Math.min(.2 * view.span / (t1 - t0) * (width - left), width - EDGE - from)) - 6;
    c.fillStyle = colours.bad; c.font = small; c.textAlign = "left"; label(c, m.f + "  " + m.label, from + 3, y + 7, room);
  }

  function blocks(c, l, left, right, mute) {
    const n = l.start.length, scale = (right - left) / (t1 - t0), narrow = l.kind === "owner" ? 5 : 1.2;
    let drawn = 0, column = null;
    c.font = small; c.textAlign = "left";
    for (let i = first(l, t0); i < n && l.start[i] < t1; i++) {
      const start = Math.max(l.start[i], t0), end = Math.min(l.end[i], t1);
      if (end < start) continue;
      let a = left + (start - t0) * scale, b = left + (end - t0) * scale;
      if (b - a < narrow) { /* too narrow to see apart: a column of pixels shows how much of it each has */
        const key = Math.floor(a / narrow);
        if (column && column.key !== key) { drawn += flush(c, l, column); column = null; }
        if (!column) column = { key, a, b, of: new Map(), i };
        column.b = Math.max(column.b, b); const s = look(l, i); column.of.set(s.fill, (column.of.get(s.fill) || 0) + b - a);
        continue;
      }
      if (column) { drawn += flush(c, l, column); column = null; }
      if (l.kind === "owner") { a = Math.round(a); b = Math.round(b); } /* neighbours without a seam */
      const s = look(l, i), w = Math.max(b - a - (b - a > 4 && l.kind !== "owner" ? .75 : 0), .8);
      c.fillStyle = s.fill; c.fillRect(a, l.y, w, l.h); drawn++;
      if (s.shade) { c.fillStyle = s.shade > 0 ? "#fff" : "#000"; c.globalAlpha = Math.abs(s.shade); c.fillRect(a, l.y, w, l.h); c.globalAlpha = 1; }
      if (s.idle && w > 3) { c.fillStyle = hatch; c.fillRect(a, l.y, w, l.h); }
      if (l.count && l.count[i] > 1 && w > 3) { c.fillStyle = colours.paper; c.globalAlpha = .55; c.fillRect(a, l.y + l.h - 3, w, 1); c.globalAlpha = 1; }
      if (!mute && b - a > 34) text(c, l, i, s, a, b);
    }
    return drawn + (column ? flush(c, l, column) : 0);
  }
  /* Owners leave no gap, so their column is stacked; elsewhere a column is as strong as it is full. */
  function flush(c, l, column) {
    if (l.kind === "owner") {
      const whole = [...column.of.values()].reduce((p, q) => p + q, 0) || 1; let y = l.y + l.h;
      for (const part of data.parts) {
        const look = colours.of[part.name], share = look && column.of.get(look.fill);
        if (!share) continue;
        column.of.delete(look.fill); const h = l.h * share / whole, a = Math.round(column.a); y -= h; c.fillStyle = look.fill; c.fillRect(a, y, Math.max(Math.round(column.b) - a, 1), h);
      }
      return 1;
    }
    const at = Math.floor(column.a); let full = 0, most = 0, fill = "";
    for (const [colour, px] of column.of) { full += px; if (px >= most) { most = px; fill = colour; } }
    c.fillStyle = fill; c.globalAlpha = Math.max(.35, Math.min(1, full / Math.max(1, column.b - at))); c.fillRect(at, l.y, 1, l.h); c.globalAlpha = 1;
    return 1;
  }

  function text(c, l, i, s, from, to) {
    const words = said(l, i).replace(/^idle: /, ""), room = to - from - 10;
    if (s.idle) { const w = Math.min(c.measureText(words).width + 8, to - from - 2); c.fillStyle = s.fill; c.fillRect(from + 1, l.y + 4, w + 1, l.h - 8); }
    c.fillStyle = s.ink; label(c, words, from + 5, l.y + l.h / 2 + .5, room);
  }
  function label(c, words, px, py, room) {
    if (room < 12) return;
    if (c.measureText(words).width > room) {
      let keep = Math.floor(words.length * room / c.measureText(words).width) - 1;
      while (keep > 0 && c.measureText(words.slice(0, keep) + "…").width > room) keep--;
      if (keep < 2) return;
      words = words.slice(0, keep) + "…";
    }
    c.fillText(words, px, py);
  }
  const said = (l, i) => l.kind === "owner" ? (data.labels[view.names[l.name[i]]] || view.names[l.name[i]]) : (view.short[l.name[i]] || view.names[l.name[i]]);

  function outline(c, l, i, colour) {
    const a = x(l.start[i]), b = Math.max(x(l.end[i]), a + 2);
    c.strokeStyle = colours.paper; c.lineWidth = 4; c.strokeRect(a, l.y, b - a, l.h); c.strokeStyle = colour; c.lineWidth = 2; c.strokeRect(a, l.y, b - a, l.h);
  }

  function overview() {
    const c = map.getContext("2d"), l = lanes[0], left = gutter + EDGE, w = width - gutter - 2 * EDGE;
    c.clearRect(0, 0, width, 28);
    if (l) { const keep = [l.y, l.h, t0, t1]; [l.y, l.h, t0, t1] = [8, 12, 0, view.span]; blocks(c, l, left, left + w, true); [l.y, l.h, t0, t1] = keep; }
    const a = left + t0 / view.span * w, b = left + t1 / view.span * w;
    c.fillStyle = colours.paper; c.globalAlpha = .72; c.fillRect(left, 6, a - left, 16); c.fillRect(b, 6, left + w - b, 16); c.globalAlpha = 1;
    c.strokeStyle = colours.ink; c.lineWidth = 1.5; c.strokeRect(a, 5, Math.max(b - a, 3), 18);
    if (gutter) { c.font = font; c.textBaseline = "middle"; c.fillStyle = colours.faint; c.fillText("All of it", 12, 14.5); }
  }

  function length(ns) {
    const a = Math.abs(ns), [s, u] = a < 999.5 ? [1, "ns"] : a < 999500 ? [1e3, "µs"] : a < 999.5e6 ? [1e6, "ms"] : [1e9, "s"], v = ns / s;
    return (s === 1 ? Math.round(v) : Math.abs(v) >= 99.95 ? v.toFixed(0) : Math.abs(v) >= 9.995 ? v.toFixed(1) : v.toFixed(2)) + " " + u;
  }
  function stamp(ns, by) {
    const [s, u] = t1 < 1e4 && by < 1e3 ? [1, "ns"] : by < 1e3 || t1 < 1e6 ? [1e3, "µs"] : t1 < 1e10 ? [1e6, "ms"] : [1e9, "s"];
    return (ns / s).toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(by / s) + 1e-9)))) + " " + u;
  }

  /* A moment, exact to the ns on a view of any length. */
  const moment = (ns) => view.span < 1e6 ? (ns / 1e3).toFixed(3) + " µs" : (ns / 1e6).toFixed(view.span < 1e9 ? 4 : 3) + " ms";

  function hit(px, py) {
    const t = time(px), slack = 3 * (t1 - t0) / Math.max(1, width - gutter);
    for (const l of lanes) {
      if (py < l.y - 1 || py > l.y + l.h + 2) continue;
      let best = null, away = slack;
      for (let i = first(l, t - slack); i < l.start.length && l.start[i] <= t + slack; i++) {
        const d = t < l.start[i] ? l.start[i] - t : t > l.end[i] ? t - l.end[i] : 0;
        if (d < away || (d === 0 && away === 0)) { best = { l, i }; away = d; }
      }
      return best;
    }
    const row = Math.floor((py - AXIS - 2) / MARK), m = marks.find((k) => k.row === row && k.spans.some(([s, e]) => x(s) - 2 <= px && x(e) + 2 >= px));
    return m ? { m } : null;
  }

  function lines(h) {
    if (h.m) return ["Finding " + h.m.f + ": " + h.m.title, h.m.label === h.m.title ? h.m.value : h.m.label + ": " + h.m.value];
    const { l, i } = h, many = l.count && l.count[i] > 1, d = l.end[i] - l.start[i];
    return [said(l, i), length(d) + (many ? ", " + l.count[i] + " events drawn as one, most of it this" : "") + ", from " + moment(l.start[i]) + " on; " + l.label];
  }
  function point(e) {
    const r = main.getBoundingClientRect(), px = e.clientX - r.left, py = e.clientY - r.top;
    const before = hover; hover = hit(px, py);
    if ((before && before.l) !== (hover && hover.l) || (before && before.i) !== (hover && hover.i)) later();
    if (!hover) { tip.hidden = true; return; }
    const [head, rest] = lines(hover); tip.textContent = "";
    const b = document.createElement("b"); b.textContent = head; tip.append(b, rest); tip.hidden = false;
    const tx = Math.min(px + 14, width - tip.offsetWidth - 6), ty = py + main.offsetTop + 18 + tip.offsetHeight > box.clientHeight ? py + main.offsetTop - tip.offsetHeight - 10 : py + main.offsetTop + 18;
    tip.style.transform = "translate(" + Math.max(4, tx) + "px," + Math.max(4, ty) + "px)";
  }

  function pick(h) {
    picked = h && h.l ? h : null;
    if (picked) lane = lanes.indexOf(picked.l);
    detail.textContent = "";
    if (!h) return later();
    if (h.m) { const [head, rest] = lines(h); say(head + ". " + rest, "finding-" + h.m.f); return later(); }
    const { l, i } = h, p = document.createElement("p"), q = document.createElement("p"), code = document.createElement("code"), d = l.end[i] - l.start[i], many = l.count && l.count[i] > 1;
    code.textContent = l.kind === "owner" ? said(l, i) : view.names[l.name[i]]; p.append(code);
    q.textContent = l.label + ": " + length(d) + " (" + (100 * d / view.span).toFixed(d < view.span / 10 ? 1 : 0) + " % of the picture), from " + moment(l.start[i]) + " to " + moment(l.end[i]) +
      (many ? ". Stands for " + l.count[i] + " events too short to draw apart (" + l.detail + "); the name is the one that fills most of it." : ".");
    detail.append(p, q); later();
  }
  function say(words, link) {
    detail.textContent = ""; const p = document.createElement("p"); p.append(words);
    if (link) { const a = document.createElement("a"); a.href = "#" + link; a.textContent = "read it"; p.append(" ", a); }
    detail.append(p);
  }

  let glide = 0;
  function go(a, b, at_once) {
    const least = Math.min(MIN_SPAN, view.span); let span = Math.min(Math.max(b - a, least), view.span);
    const middle = (a + b) / 2; a = b - a === span ? a : middle - span / 2;
    a = Math.max(0, Math.min(a, view.span - span)); b = a + span;
    cancelAnimationFrame(glide);
    if (at_once || still.matches) { t0 = a; t1 = b; return later(); }
    const from = [t0, t1], began = performance.now();
    const step = (now) => { const k = Math.min(1, Math.max(0, (now - began) / 160)), s = 1 - (1 - k) ** 3; t0 = from[0] + (a - from[0]) * s; t1 = from[1] + (b - from[1]) * s; draw(); if (k < 1) glide = requestAnimationFrame(step); };
    glide = requestAnimationFrame(step);
  }
  const zoom = (factor, centre, at_once) => go(centre - (centre - t0) * factor, centre + (t1 - centre) * factor, at_once);
  const pan = (by, at_once) => { const span = t1 - t0, a = Math.max(0, Math.min(t0 + by, view.span - span)); go(a, a + span, at_once); };
  function onto(l, i) { const pad = Math.max((l.end[i] - l.start[i]) * .6, MIN_SPAN / 2); go(l.start[i] - pad, l.end[i] + pad); }

  main.addEventListener("wheel", (e) => {
    const sideways = Math.abs(e.deltaX) > Math.abs(e.deltaY), unit = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? 400 : 1;
    if (sideways || e.shiftKey) { e.preventDefault(); return pan((sideways ? e.deltaX : e.deltaY) * unit / (width - gutter) * (t1 - t0), true); }
    if (!(e.ctrlKey || e.metaKey || document.activeElement === main)) return undefined; /* the page scrolls on */
    e.preventDefault(); const r = main.getBoundingClientRect();
    return zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY * unit * (e.ctrlKey ? .006 : .002)))), Math.max(t0, Math.min(t1, time(e.clientX - r.left))), true);
  }, { passive: false });

  const down = new Map(); let moved = 0, start = null;
  main.addEventListener("pointerdown", (e) => {
    down.set(e.pointerId, e.clientX); moved = 0; start = { px: e.clientX, t0, t1, shift: e.shiftKey, at: time(e.clientX - main.getBoundingClientRect().left) };
    if (e.pointerType === "mouse" && e.button !== 0) down.delete(e.pointerId);
    try { main.setPointerCapture(e.pointerId); } catch { /* a synthetic pointer has no capture */ }
  });
  main.addEventListener("pointermove", (e) => {
    if (!down.has(e.pointerId)) return e.pointerType === "mouse" ? point(e) : undefined;
    const was = down.get(e.pointerId), r = main.getBoundingClientRect();
    moved += Math.abs(e.clientX - was);
    if (down.size === 2) {
      const other = [...down].find(([id]) => id !== e.pointerId)[1], a = Math.abs(was - other), b = Math.abs(e.clientX - other);
      if (a > 8 && b > 8) zoom(a / b, time((e.clientX + other) / 2 - r.left), true);
    } else if (start.shift) { const t = time(e.clientX - r.left); band = [Math.min(start.at, t), Math.max(start.at, t)]; later(); }
    else if (moved > 3) { main.classList.add("moving"); tip.hidden = true; const by = (start.px - e.clientX) / (width - gutter - 2 * EDGE) * (start.t1 - start.t0); const a = Math.max(0, Math.min(start.t0 + by, view.span - (start.t1 - start.t0))); go(a, a + start.t1 - start.t0, true); }
    down.set(e.pointerId, e.clientX); if (down.size === 2) start = { ...start, px: e.clientX, t0, t1 };
    return undefined;
  });
  function up(e) {
    if (!down.delete(e.pointerId)) return;
    main.classList.remove("moving");
    if (band) { const b = band; band = null; if (moved > 6) go(b[0], b[1]); later(); }
    else if (moved <= 3 && e.type === "pointerup") { const r = main.getBoundingClientRect(); pick(hit(e.clientX - r.left, e.clientY - r.top)); }
    if (down.size === 1) start = { px: [...down.values()][0], t0, t1, shift: false, at: 0 };
  }
  main.addEventListener("pointerup", up); main.addEventListener("pointercancel", up);
  main.addEventListener("pointerleave", () => { tip.hidden = true; if (hover) { hover = null; later(); } });
  main.addEventListener("dblclick", (e) => { const r = main.getBoundingClientRect(), h = hit(e.clientX - r.left, e.clientY - r.top); if (h && h.l) onto(h.l, h.i); else if (h && h.m) go(h.m.s, h.m.e); else zoom(.33, time(e.clientX - r.left)); });

  function step(by) {
    const l = lanes[lane]; if (!l || !l.start.length) return;
    let i = picked && picked.l === l ? picked.i + by : first(l, t0);
    i = Math.max(0, Math.min(l.start.length - 1, i));
    if (l.end[i] < t0 || l.start[i] > t1) { const span = t1 - t0, a = l.start[i] - span * .3; go(a, a + span); }
    pick({ l, i });
  }
  main.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const span = t1 - t0, middle = (t0 + t1) / 2, centre = picked ? Math.max(t0, Math.min(t1, (picked.l.start[picked.i] + picked.l.end[picked.i]) / 2)) : middle;
    const act = { ArrowLeft: () => pan(-span * .15), ArrowRight: () => pan(span * .15), "+": () => zoom(.6, centre), "=": () => zoom(.6, centre), "-": () => zoom(1 / .6, centre), 0: () => go(0, view.span), Home: () => go(0, span), End: () => go(view.span - span, view.span),
      ArrowUp: () => { lane = Math.max(0, lane - 1); picked = null; step(0); }, ArrowDown: () => { lane = Math.min(lanes.length - 1, lane + 1); picked = null; step(0); }, n: () => step(1), p: () => step(-1),
      Enter: () => { if (picked) onto(picked.l, picked.i); }, Escape: () => { pick(null); go(0, view.span); } }[e.key.length === 1 ? e.key.toLowerCase() : e.key];
    if (act) { e.preventDefault(); act(); }
  });
  main.addEventListener("focus", later); main.addEventListener("blur", later);
  map.addEventListener("pointerdown", (e) => { map.setPointerCapture(e.pointerId); to(e); });
  map.addEventListener("pointermove", (e) => { if (e.buttons) to(e); });
  function to(e) { const t = (e.clientX - map.getBoundingClientRect().left - gutter - EDGE) / (width - gutter - 2 * EDGE) * view.span, span = t1 - t0; go(t - span / 2, t + span / 2, true); }

  for (const b of document.querySelectorAll(".pick")) b.addEventListener("click", () => show(Number(b.dataset.view)));
  for (const b of document.querySelectorAll(".zoom button")) b.addEventListener("click", () => ({ in: () => zoom(.5, (t0 + t1) / 2), out: () => zoom(2, (t0 + t1) / 2), all: () => go(0, view.span) })[b.dataset.do]());
  for (const b of document.querySelectorAll(".show")) b.addEventListener("click", () => {
    show(Number(b.dataset.view)); const a = Number(b.dataset.from), z = Number(b.dataset.to), pad = Math.max((z - a) * .15, view.span * .02); go(a - pad, z + pad, true);
    document.getElementById("timeline").scrollIntoView({ behavior: still.matches ? "auto" : "smooth" }); main.focus({ preventScroll: true });
  });
  new ResizeObserver(() => { if (Math.abs(box.clientWidth - width) > 1) measure(); }).observe(box);
  show(0); say("Point at an event, click it, or walk to it with the keys.");
  return { repaint: () => { palette(); draw(); } };
}
