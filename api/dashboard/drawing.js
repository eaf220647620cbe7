// The search tree: colour is the verifier's score, width is tokens, dashed is pruned, bold is the best path.

import { arrange } from "./layout.js";
import { put, svg, write } from "./dom.js";
import { line, score } from "./words.js";

const MOVE = 280; // milliseconds
const PICK = 22; // pixels around a node within which a pointer selects it
const LEFT = 34;
const EDGE = 20;
const LABELS = 200; // pixels for the labels of the last column
const CHARACTER = 6.1;
const MAX_COLUMN = 190; // pixels
const MAX_ROW = 34; // pixels
const READABLE = 7; // pixels of a row from which labels are shown
const MOST_MOVING = 700; // nodes; larger trees are not animated
const MOST_NEW = 60; // new nodes at once; more of them, as when a journal is loaded, are not animated

const still = matchMedia("(prefers-reduced-motion: reduce)");
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export class Drawing {
  /** `onPick(id)` for a click, `onHover(id or null, x, y)` for a pointer over a node. */
  constructor(canvas, { onPick, onHover }) {
    this.canvas = canvas;
    this.halo = svg("path", { class: "halo" });
    this.root = svg("rect", { class: "root", x: -5, y: -5, width: 10, height: 10, rx: 2.5 });
    this.edges = svg("g");
    this.marks = svg("g");
    canvas.replaceChildren(this.halo, this.edges, this.root, this.marks);
    this.entries = new Map();
    this.onPick = onPick;
    this.onHover = onHover;
    this.#listen();
    this.size = { width: 0, height: 0 }; // cached, since reading it while drawing would force a layout
    new ResizeObserver(([entry]) => this.#resized(entry.contentRect)).observe(canvas);
    this.clear();
  }

  clear() {
    this.edges.replaceChildren();
    this.marks.replaceChildren();
    this.halo.removeAttribute("d");
    this.entries.clear();
    this.laid = null;
    this.known = 0;
    this.shown = 0;
    this.view = { x: LEFT, y: 0, dx: 100, dy: 24 };
    this.fitting = true;
    this.moment = null;
    this.selected = null;
  }

  /** Draws a snapshot. Nodes keep their positions in the newest one, so that a replay does not move them. */
  draw(moment, newest, selected) {
    this.moment = moment;
    this.selected = selected;
    const news = Math.abs(moment.nodes.size - this.shown);
    this.shown = moment.nodes.size;
    if (newest.nodes.size !== this.known || !this.laid) {
      this.laid = arrange(newest.nodes);
      this.known = newest.nodes.size;
      if (this.fitting) this.view = this.#fitted();
    }
    this.#paint(!still.matches && news <= MOST_NEW && this.known <= MOST_MOVING);
  }

  fit() {
    this.fitting = true;
    if (!this.laid) return;
    this.view = this.#fitted();
    this.#paint(!still.matches);
  }

  /** Zooms around a point of the canvas; by default the selected step moves to the centre. */
  zoom(factor, x, y) {
    const { view } = this;
    if (x === undefined) {
      x = this.size.width / 2;
      y = this.size.height / 2;
      const place = this.laid?.places.get(this.selected);
      if (place) {
        const at = this.#at(place);
        view.x += x - at.x;
        view.y += y - at.y;
      }
    }
    const dx = clamp(view.dx * factor, 3, 600);
    const dy = clamp(view.dy * factor, 1.5, 120);
    this.view = { dx, dy, x: x - ((x - view.x) * dx) / view.dx, y: y - ((y - view.y) * dy) / view.dy };
    this.#free();
  }

  pan(x, y) {
    this.view = { ...this.view, x: this.view.x + x, y: this.view.y + y };
    this.#free();
  }

  /** Returns the node that an arrow key selects from `id`. */
  neighbour(id, direction) {
    const shown = (other) => other && this.moment.nodes.has(other);
    if (!shown(id)) return this.moment.best ?? [...this.moment.nodes.keys()][0] ?? null;
    const node = this.moment.nodes.get(id);
    if (direction === "left") return shown(node.parent) ? node.parent : id;
    if (direction === "right") {
      const below = this.laid.children.get(id).filter(shown);
      const worth = (other) => [this.moment.onBestPath(other), this.moment.nodes.get(other).score ?? -1];
      below.sort((a, b) => worth(b)[0] - worth(a)[0] || worth(b)[1] - worth(a)[1]);
      return below[0] ?? id;
    }
    const { column, row } = this.laid.places.get(id);
    const sign = direction === "up" ? -1 : 1;
    let [best, distance] = [id, Infinity];
    for (const other of this.moment.nodes.keys()) {
      const place = this.laid.places.get(other);
      const away = (place.row - row) * sign;
      if (place.column === column && away > 0 && away < distance) [best, distance] = [other, away];
    }
    return best;
  }

  /** Scrolls a node into view. */
  reveal(id) {
    const place = this.laid?.places.get(id);
    if (!place || this.fitting) return;
    const { x, y } = this.#at(place);
    const { width, height } = this.size;
    const right = x < EDGE ? EDGE - x : Math.min(0, width - EDGE - x);
    const down = y < EDGE ? EDGE - y : Math.min(0, height - EDGE - y);
    if (right || down) this.pan(right, down);
  }

  #fitted() {
    const { width, height } = this.size;
    const { columns, rows } = this.laid;
    const dy = clamp((height - 2 * EDGE) / Math.max(1, rows), 1, MAX_ROW);
    const labels = dy >= READABLE ? Math.min(LABELS, width * 0.28) : EDGE;
    const dx = clamp((width - LEFT - labels) / Math.max(1, columns), 2, MAX_COLUMN);
    return { dx, dy, x: LEFT, y: (height - dy * rows) / 2 };
  }

  #at({ column, row }) {
    const { view } = this;
    return { x: view.x + column * view.dx, y: view.y + row * view.dy };
  }

  #free() {
    this.fitting = false;
    if (this.moment) this.#paint(false);
  }

  #resized({ width, height }) {
    this.size = { width, height };
    if (!this.moment) return;
    if (this.fitting) this.view = this.#fitted();
    this.#paint(false);
  }

  // Appearance and position of every node.

  #paint(moving) {
    const { view, moment } = this;
    const radius = clamp(Math.min(view.dx * 0.2, view.dy * 0.36), 1.4, 6.5);
    const thick = clamp(view.dy / 24, 0.35, 1.15);
    this.canvas.style.setProperty("--rim", (radius / 6.5).toFixed(2));
    put(this.halo, "stroke-width", (3 + 6 * thick).toFixed(1));
    let most = 1;
    for (const node of moment.nodes.values()) most = Math.max(most, node.tokens);
    for (const [id, entry] of this.entries) if (!moment.nodes.has(id)) this.#hide(entry);
    for (const node of moment.nodes.values()) {
      const entry = this.entries.get(node.id) ?? this.#enter(node);
      this.#dress(entry, node, radius, thick, most);
      const to = this.#at(this.laid.places.get(node.id));
      if (entry.hidden) this.#show(entry, node, moving);
      entry.from = moving ? { x: entry.x, y: entry.y } : to;
      entry.to = to;
    }
    const origin = this.#at(this.laid.places.get(""));
    const from = this.origin && moving ? this.origin : origin;
    this.began = performance.now();
    cancelAnimationFrame(this.frame);
    const step = (now) => {
      const part = moving ? clamp((now - this.began) / MOVE, 0, 1) : 1;
      const eased = 1 - (1 - part) ** 3;
      this.origin = between(from, origin, eased);
      this.#place(eased, radius);
      if (part < 1) this.frame = requestAnimationFrame(step);
    };
    step(this.began);
  }

  #place(eased, radius) {
    put(this.root, "transform", `translate(${this.origin.x.toFixed(1)} ${this.origin.y.toFixed(1)})`);
    let halo = "";
    for (const [id, entry] of this.entries) {
      if (entry.hidden) continue;
      Object.assign(entry, between(entry.from, entry.to, eased));
      const parent = this.entries.get(entry.parent);
      const start = parent && !parent.hidden ? { x: parent.x + parent.out, y: parent.y } : this.origin;
      const curve = edge(start, entry, radius);
      put(entry.edge, "d", curve);
      put(entry.mark, "transform", `translate(${entry.x.toFixed(1)} ${entry.y.toFixed(1)})`);
      if (this.moment.onBestPath(id)) halo += curve;
    }
    put(this.halo, "d", halo);
  }

  #enter(node) {
    const entry = {
      edge: svg("path", { class: "edge" }),
      mark: svg("g", { class: "node" }),
      dot: svg("circle"),
      value: svg("tspan", { class: "score" }),
      words: svg("tspan"),
      strip: null,
      hidden: true,
      parent: node.parent,
      out: 0,
    };
    entry.label = svg("text", {}, entry.value, entry.words);
    entry.mark.append(entry.dot, entry.label);
    entry.mark.dataset.node = node.id;
    this.edges.append(entry.edge);
    this.marks.append(entry.mark);
    this.entries.set(node.id, entry);
    return entry;
  }

  #hide(entry) {
    if (entry.hidden) return;
    entry.hidden = true;
    entry.mark.style.display = entry.edge.style.display = "none";
  }

  /** Animates a new node from its parent. */
  #show(entry, node, moving) {
    const parent = this.entries.get(node.parent);
    const start = parent && !parent.hidden ? parent : this.origin;
    const at = moving && start ? start : this.#at(this.laid.places.get(node.id));
    entry.x = at.x;
    entry.y = at.y;
    entry.hidden = false;
    entry.mark.style.display = entry.edge.style.display = "";
  }

  #dress(entry, node, radius, thick, most) {
    const { moment, view } = this;
    const states = [
      node.score === null ? "unscored" : "scored",
      node.state === "pruned" && "pruned",
      node.answer !== null && "answered",
      moment.onFrontier(node) && "frontier",
      moment.onBestPath(node.id) && "best",
      node.id === this.selected && "selected",
    ].filter(Boolean).join(" ");
    put(entry.mark, "class", `node ${states}`);
    put(entry.edge, "class", `edge ${states}`);
    if (node.score !== entry.score) {
      entry.score = node.score;
      for (const element of [entry.mark, entry.edge]) element.style.setProperty("--s", clamp(node.score ?? 0, 0, 1));
    }
    put(entry.edge, "stroke-width", (thick * (1 + (5 * node.tokens) / most)).toFixed(2));
    put(entry.dot, "r", radius.toFixed(2));
    this.#strip(entry, node, radius);
    const place = this.laid.places.get(node.id);
    const leaf = node.children === 0; // at this point of a replay
    const size = clamp(view.dy, READABLE, 11) / 11;
    const room = Math.min((place.free || 1) * view.dx, this.size.width - view.x - place.column * view.dx - 4);
    const left = Math.floor((room - entry.out - radius - 14) / (CHARACTER * size));
    const readable = view.dy >= READABLE && left >= 4;
    write(entry.value, (leaf ? readable : view.dy >= 24 && view.dx >= 40) && node.score !== null ? score(node.score) : "");
    write(entry.words, leaf && readable && left > 8 ? line(node.answer === null ? node.text : `= ${node.answer}`, left - 5) : "");
    put(entry.words, "dx", entry.value.textContent ? 5 : 0);
    put(entry.label, "class", leaf ? "leaf" : "inner");
    put(entry.label, "font-size", leaf ? clamp(view.dy, READABLE, 11).toFixed(1) : 10);
    put(entry.label, "x", leaf ? (entry.out + radius + 5).toFixed(1) : 0);
    put(entry.label, "y", leaf ? (3.8 * size).toFixed(1) : (-radius - 4).toFixed(1));
  }

  /** A node of several steps has a cell for each of their scores. */
  #strip(entry, node, radius) {
    if (node.scores.length < 2 || radius < 2) {
      entry.strip?.remove();
      entry.strip = null;
      entry.out = 0;
      return;
    }
    const room = this.laid.places.get(node.id).free * this.view.dx;
    const width = clamp((Math.min(room, 480) * 0.5) / node.scores.length, 2, 16);
    const height = clamp(radius * 1.8, 3, 11);
    const shape = `${node.scores.length}/${width.toFixed(1)}/${height.toFixed(1)}`;
    entry.out = radius + 3 + width * node.scores.length;
    if (entry.strip?.dataset.shape === shape) return;
    const cells = node.scores.map((value, index) =>
      svg("rect", {
        x: (radius + 3 + index * width).toFixed(1), y: (-height / 2).toFixed(1),
        width: Math.max(1, width - 1).toFixed(1), height: height.toFixed(1), style: { "--s": clamp(value, 0, 1) },
      }),
    );
    const strip = svg("g", { class: "strip" }, cells);
    strip.dataset.shape = shape;
    if (entry.strip) entry.strip.replaceWith(strip);
    else entry.mark.append(strip);
    entry.strip = strip;
  }

  // Pointers: one drags or selects, two zoom, and so does the wheel.

  #listen() {
    const pointers = new Map();
    let dragged = 0;
    const { canvas } = this;
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      pointers.set(event.pointerId, point(event));
      canvas.setPointerCapture(event.pointerId);
      dragged = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = point(event);
      const before = pointers.get(event.pointerId);
      if (!before) {
        const id = this.#near(now);
        canvas.classList.toggle("over", id !== null);
        this.onHover(id, event.clientX, event.clientY);
        return;
      }
      const other = [...pointers].find(([pointer]) => pointer !== event.pointerId)?.[1];
      if (other) {
        const factor = distance(now, other) / Math.max(1, distance(before, other));
        this.zoom(factor, (now.x + other.x) / 2, (now.y + other.y) / 2);
        dragged = Infinity;
      } else {
        dragged += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
        if (dragged > 4) this.pan(now.x - before.x, now.y - before.y);
      }
      pointers.set(event.pointerId, now);
    });
    const up = (event) => {
      const was = pointers.delete(event.pointerId);
      if (was && event.type === "pointerup" && dragged <= 4) {
        const id = this.#near(point(event));
        if (id !== null) this.onPick(id);
      }
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.onHover(null));
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { x, y } = point(event);
      this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)), x, y);
    }, { passive: false });
  }

  #near({ x, y }) {
    let [best, closest] = [null, PICK ** 2];
    for (const [id, entry] of this.entries) {
      if (entry.hidden) continue;
      const right = Math.max(0, x - entry.x - entry.out); // the bar belongs to its node
      const away = (x < entry.x ? (x - entry.x) ** 2 : right ** 2) + (y - entry.y) ** 2;
      if (away < closest) [best, closest] = [id, away];
    }
    return best;
  }
}

function edge(from, to, radius) {
  const end = to.x - radius;
  const bend = (end - from.x) * 0.5;
  return (
    `M${from.x.toFixed(1)} ${from.y.toFixed(1)}` +
    `C${(from.x + bend).toFixed(1)} ${from.y.toFixed(1)} ${(end - bend).toFixed(1)} ${to.y.toFixed(1)} ${end.toFixed(1)} ${to.y.toFixed(1)}`
  );
}

const distance = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);
const between = (from, to, part) => ({ x: from.x + (to.x - from.x) * part, y: from.y + (to.y - from.y) * part });
