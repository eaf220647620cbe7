// Positions of nodes: a tidy tree after Reingold and Tilford (IEEE TSE 7(2), 1981), levels from left to right.

const SIBLINGS = 1;
const COUSINS = 1.35;
const CLEAR = 0.85; // rows around a label without other nodes
const CROSSED = 0.6; // share of a column that a label may use before outgoing edges cross it

/**
 * Returns the columns and rows of all nodes: `{places: Map(id -> {column, row, free}), columns, rows}`. The root "" is in column 0.
 * `free` is how many columns to the right of a leaf are empty in its row, so that a label may run into them.
 */
export function arrange(nodes) {
  const children = new Map([["", []]]);
  for (const node of nodes.values()) {
    if (!children.has(node.id)) children.set(node.id, []);
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node.id);
  }
  for (const ids of children.values()) ids.sort((a, b) => last(a) - last(b));
  const offsets = new Map();
  const outline = contour("", children, offsets);
  const top = Math.min(...outline.low);
  const places = new Map();
  const levels = [];
  placeSubtree("", 0, -top, children, offsets, places, levels);
  const fans = levels.map(() => []);
  for (const [id, place] of places) {
    const rows = children.get(id).map((child) => places.get(child).row);
    if (rows.length) fans[place.column].push([Math.min(place.row, rows[0]), Math.max(place.row, rows.at(-1))]);
  }
  for (const [id, place] of places) place.free = children.get(id).length ? 0 : countFreeColumns(place, levels, fans);
  return { places, children, columns: levels.length - 1, rows: Math.max(...outline.high) - top };
}

const last = (id) => Number(id.slice(id.lastIndexOf(".") + 1));

/** Moves the subtrees of a node as close together as possible; returns their outline, relative to the node. */
function contour(id, children, offsets) {
  const low = [0];
  const high = [0];
  const below = [];
  const edge = []; // lower outline of the subtrees placed so far, by depth
  for (const child of children.get(id)) {
    const part = contour(child, children, offsets);
    let shift = below.length ? -Infinity : 0;
    for (let depth = 0; depth < Math.min(edge.length, part.low.length); depth += 1) {
      shift = Math.max(shift, edge[depth] - part.low[depth] + (depth ? COUSINS : SIBLINGS));
    }
    part.high.forEach((value, depth) => {
      edge[depth] = value + shift;
    });
    below.push({ child, part, shift });
  }
  if (below.length) {
    const middle = (below[0].shift + below.at(-1).shift) / 2;
    for (const { child, part, shift } of below) {
      offsets.set(child, shift - middle);
      part.low.forEach((value, depth) => {
        low[depth + 1] = Math.min(low[depth + 1] ?? Infinity, value + shift - middle);
        high[depth + 1] = Math.max(high[depth + 1] ?? -Infinity, part.high[depth] + shift - middle);
      });
    }
  }
  return { low, high };
}

function placeSubtree(id, column, row, children, offsets, places, levels) {
  places.set(id, { column, row, free: 0 });
  (levels[column] ??= []).push(row);
  for (const child of children.get(id)) {
    placeSubtree(child, column + 1, row + offsets.get(child), children, offsets, places, levels);
  }
}

/** Returns the free columns to the right of a leaf; edges that cross the row take the second half of their column. */
function countFreeColumns({ column, row }, levels, fans) {
  for (let next = column; next < levels.length - 1; next += 1) {
    if (fans[next].some(([low, high]) => low - CLEAR / 2 < row && row < high + CLEAR / 2)) return next - column + CROSSED;
    if (levels[next + 1].some((other) => Math.abs(other - row) < CLEAR)) return next + 1 - column;
  }
  return Infinity;
}
