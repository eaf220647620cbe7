// The timeline of events, with scores as dots and decisions and prunings as marks, and its replay.

import { byId, el, put, svg, write } from "./dom.js";
import * as words from "./words.js";

const MIN_SECONDS = 4; // of a replay
const LONGEST = 20;
const PER_SECOND = 24; // events

export class Timeline {
  /** `onSeek(seq)` is called when the user or a replay moves the position. */
  constructor(onSeek) {
    this.onSeek = onSeek;
    this.slider = byId("seek");
    this.play = byId("play");
    this.marks = byId("marks");
    this.readout = byId("event");
    this.playing = null;
    this.slider.addEventListener("input", () => {
      this.stop();
      onSeek(Number(this.slider.value));
    });
    this.play.addEventListener("click", () => this.toggle());
    byId("back").addEventListener("click", () => this.step(-1));
    byId("forward").addEventListener("click", () => this.step(1));
    byId("live").addEventListener("click", () => this.end());
    this.clear();
  }

  clear() {
    this.stop();
    this.drawn = 0;
    this.replay = null;
    this.marks.replaceChildren();
  }

  draw(replay) {
    this.replay = replay;
    const { shown, length, live } = replay;
    for (const event of replay.events.slice(this.drawn)) this.#mark(event);
    this.drawn = length;
    put(this.marks, "viewBox", `0.5 0 ${Math.max(1, length)} 1`);
    put(this.slider, "max", Math.max(1, length));
    this.slider.value = shown.seq;
    this.slider.style.setProperty("--share", length > 1 ? (shown.seq - 1) / (length - 1) : 1);
    const told = shown.last ? words.event(shown.last) : "no event yet";
    put(this.slider, "aria-valuetext", `event ${shown.seq} of ${length}: ${told}`);
    this.readout.replaceChildren(
      el("b", {}, `${words.whole(shown.seq)} / ${words.whole(length)}`),
      el("span", { class: "clock" }, words.seconds(shown.spent.seconds)),
      el("span", { class: "told" }, told),
    );
    const running = replay.newest.running || replay.newest.status === "queued";
    write(byId("live"), live ? (running ? "live" : "end") : running ? "go live" : "to the end");
    put(byId("live"), "data-live", live && running);
    byId("live").disabled = live;
    byId("live").classList.toggle("done", live && !running);
    put(this.play, "aria-pressed", this.playing !== null);
    put(this.play, "aria-label", this.playing === null ? "Replay the search" : "Pause the replay");
  }

  toggle() {
    if (this.playing !== null) this.stop();
    else this.#start();
    if (this.replay) this.draw(this.replay);
  }

  stop() {
    cancelAnimationFrame(this.playing);
    this.playing = null;
  }

  step(by) {
    this.stop();
    if (this.replay?.length) this.onSeek(this.replay.shown.seq + by);
  }

  start() {
    this.stop();
    this.onSeek(1);
  }

  end() {
    this.stop();
    if (this.replay) this.onSeek(this.replay.length);
  }

  #start() {
    if (!this.replay?.length) return;
    const { length } = this.replay;
    const rate = length / Math.min(LONGEST, Math.max(MIN_SECONDS, length / PER_SECOND));
    const first = this.replay.shown.seq >= length ? 1 : this.replay.shown.seq;
    let began = null;
    const tick = (now) => {
      began ??= now;
      const seq = Math.min(length, first + Math.floor(((now - began) / 1000) * rate));
      if (seq >= length) this.playing = null;
      else this.playing = requestAnimationFrame(tick);
      if (seq !== this.replay.shown.seq || this.playing === null) this.onSeek(seq);
    };
    this.playing = requestAnimationFrame(tick);
    this.onSeek(first);
  }

  #mark({ seq, type, data }) {
    if (type === "score") {
      const at = 0.92 - 0.84 * Math.min(1, Math.max(0, data.score));
      this.marks.append(svg("path", { class: "dot", d: `M${seq} ${at.toFixed(3)}h0`, style: { "--s": data.score } }));
      return;
    }
    const kind = { prune: "prune", decision: "decision", select: "select", "job.resumed": "resumed" }[type];
    if (kind) this.marks.append(svg("path", { class: kind, d: `M${seq} 0V1` }));
  }
}
