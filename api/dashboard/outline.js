// The search tree as a list of branches, for screen readers and for people who prefer to read: an ARIA tree.

import { el, fill, put } from "./dom.js";
import { summaryOf } from "./step.js";

const MOST = 100; // branches below one branch that are listed at once

export class Outline {
  constructor(list, onPick) {
    this.list = list;
    this.onPick = onPick;
    list.addEventListener("keydown", (event) => this.#press(event));
    list.addEventListener("click", (event) => this.#click(event));
    this.clear();
  }

  clear() {
    this.open = new Set();
    this.limits = new Map();
    this.drawn = "";
    this.revealed = "";
    this.list.replaceChildren();
  }

  /** Draws the branches of a snapshot whose parents are unfolded, at first those of the best path. */
  draw(moment, selected) {
    this.moment = moment;
    if (this.revealed !== `${moment.best}/${selected}`) {
      this.revealed = `${moment.best}/${selected}`;
      for (const id of [moment.best, selected]) {
        for (let at = moment.nodes.get(id)?.parent; at; at = moment.nodes.get(at)?.parent) this.open.add(at);
      }
    }
    const state = `${moment.seq}/${selected}/${[...this.open].join()}/${[...this.limits].join()}`;
    if (state === this.drawn) return;
    this.drawn = state;
    const held = this.list.contains(document.activeElement);
    this.children = Map.groupBy(moment.nodes.values(), (node) => node.parent);
    this.selected = selected;
    fill(this.list, this.#items("", 1));
    const first = this.list.querySelector("[aria-selected=true]") ?? this.list.querySelector("[role=treeitem]");
    if (first) first.tabIndex = 0;
    if (held) first?.focus({ preventScroll: true });
  }

  #items(parent, level) {
    const all = this.children.get(parent) ?? [];
    const most = this.limits.get(parent) ?? MOST;
    const items = all.slice(0, most).map((node, index) => this.#item(node, level, index + 1, all.length));
    if (all.length > most) {
      items.push(el("li", { role: "none" }, el("button", { type: "button", class: "link", "data-more": parent, tabindex: -1 }, `${all.length - most} more branches`)));
    }
    return items;
  }

  #item(node, level, position, size) {
    const { moment } = this;
    const parent = this.children.has(node.id);
    const open = parent && this.open.has(node.id);
    const state = moment.onBestPath(node.id) ? "on the best path" : moment.onFrontier(node) ? "on the frontier" : node.state;
    const row = `branch-${node.id}`;
    const details = `, ${node.tokens} tokens, ${state}${node.answer === null ? "" : `, answer ${node.answer}`}. `;
    const [value, words] = summaryOf(node, 160);
    const unseen = (text) => el("span", { class: "hidden" }, text);
    return el(
      "li",
      {
        role: "treeitem", "data-branch": node.id, tabindex: -1, "aria-level": level, "aria-posinset": position, "aria-setsize": size,
        "aria-selected": String(node.id === this.selected), "aria-expanded": parent ? String(open) : null,
        "aria-labelledby": row, // its content would include the branches below it
        class: `${node.state === "pruned" ? "pruned" : ""} ${moment.onBestPath(node.id) ? "best" : ""}`,
      },
      el(
        "div", { class: "row", id: row }, el("i", { class: parent ? "fold" : "leaf", "aria-hidden": "true" }),
        unseen(`Branch ${node.id}: ${node.score === null ? "no score" : "score"} `), value, unseen(details), words,
        el("span", { class: "count", "aria-hidden": "true" }, node.id),
      ),
      open ? el("ul", { role: "group" }, this.#items(node.id, level + 1)) : null,
    );
  }

  #click({ target }) {
    const more = target.closest("[data-more]");
    if (more) {
      this.limits.set(more.dataset.more, (this.limits.get(more.dataset.more) ?? MOST) + MOST);
      this.draw(this.moment, this.selected);
      return;
    }
    const item = target.closest("[role=treeitem]");
    if (!item) return;
    if (target.closest(".fold")) this.#fold(item, item.ariaExpanded !== "true");
    else this.onPick(item.dataset.branch);
  }

  /** Moves as the ARIA Authoring Practices say for a tree. */
  #press(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...this.list.querySelectorAll("[role=treeitem]")];
    const at = all.indexOf(item);
    const parent = item.parentElement.closest("[role=treeitem]");
    const action = {
      ArrowDown: () => this.#focus(all[at + 1]),
      ArrowUp: () => this.#focus(all[at - 1]),
      Home: () => this.#focus(all[0]),
      End: () => this.#focus(all.at(-1)),
      ArrowRight: () => (item.ariaExpanded === "false" ? this.#fold(item, true) : item.ariaExpanded === "true" && this.#focus(all[at + 1])),
      ArrowLeft: () => (item.ariaExpanded === "true" ? this.#fold(item, false) : this.#focus(parent)),
      Enter: () => this.onPick(item.dataset.branch),
      " ": () => this.onPick(item.dataset.branch),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  #focus(item) {
    if (!item) return;
    for (const other of this.list.querySelectorAll("[tabindex='0']")) put(other, "tabindex", -1);
    item.tabIndex = 0;
    item.focus();
  }

  #fold(item, open) {
    const id = item.dataset.branch;
    if (open) this.open.add(id);
    else this.open.delete(id);
    const focus = () => this.#focus(this.list.querySelector(`[data-branch="${CSS.escape(id)}"]`));
    this.drawn = "";
    const { selected } = this;
    if (!open && selected?.startsWith(`${id}.`)) this.onPick(id); // a selected branch is never hidden
    else this.draw(this.moment, selected);
    focus();
  }
}
