// A draft as a tree that grows to the right. What was accepted is its first row: a straight line.

import { svg } from "./draw.js";

const ROW = 27, HEIGHT = 21, GAP = 30, CORNER = 6, CHARACTER = 7.6, SMALL_CHARACTER = 6.1, PADDING = 9, MOST_CHARACTERS = 16;

// Blanks are drawn; what would be no glyph, or turn the text around, is replaced.
export function visible(text) {
  const shown = text
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/ /g, "·")
    .replace(/[\p{C}\p{Z}]/gu, "▯");
  const characters = [...shown];
  return characters.length > MOST_CHARACTERS ? characters.slice(0, MOST_CHARACTERS - 1).join("") + "…" : shown || "∅";
}

// Nodes with depth, row and label; the bonus is one of them.
export function layOut(draft) {
  const nodes = draft.nodes.map((node, index) => ({ ...node, index, kind: index ? "" : "anchor", children: [] }));
  const bonus = { text: draft.bonus, parent: 0, kind: "bonus", children: [] };
  for (const node of nodes) {
    if (node.parent === null) continue;
    nodes[node.parent].children.push(node);
    if (node.accepted) bonus.parent = node.index;
  }
  nodes[bonus.parent].children.push(bonus);
  const rank = (node) => (node.kind === "bonus" ? 3 : node.accepted ? 2 : node.probability);
  let rows = 0;
  const place = (node, depth, path) => {
    Object.assign(node, { depth, label: visible(node.text), path: path * (node.probability ?? 1) });
    node.children.sort((a, b) => rank(b) - rank(a));
    node.row = rows;
    node.children.forEach((child, position) => {
      if (position) rows += 1;
      place(child, depth + 1, node.path);
    });
  };
  place(nodes[0], 0, 1);
  return { nodes: [...nodes, bonus], rows: rows + 1 };
}

export function drawTree(element, draft) {
  const { nodes, rows } = layOut(draft);
  const percent = (node) => (node.kind ? "" : ` ${Math.round(node.probability * 100)}%`);
  const width = (node) => characterCells(node.label) * CHARACTER + percent(node).length * SMALL_CHARACTER + 2 * PADDING;
  const columns = [];
  for (const node of nodes) columns[node.depth] = Math.max(columns[node.depth] ?? 0, width(node));
  const left = [2];
  columns.forEach((column, depth) => (left[depth + 1] = left[depth] + column + GAP));
  const y = (node) => 14 + node.row * ROW;
  const edges = [], pills = [];
  for (const node of nodes) {
    const parent = node.kind === "bonus" ? nodes[node.parent] : node.parent === null ? null : nodes[node.parent];
    const kind = node.kind || (node.accepted ? "accepted" : "rejected");
    if (parent) {
      const x0 = left[parent.depth] + width(parent), x1 = left[node.depth], bend = x1 - GAP / 2;
      const [y0, y1] = [y(parent), y(node)];
      const down = y1 > y0 ? `H${bend - CORNER}Q${bend} ${y0} ${bend} ${y0 + CORNER}V${y1 - CORNER}Q${bend} ${y1} ${bend + CORNER} ${y1}` : "";
      edges.push(svg("path", { d: `M${x0} ${y0}${down}H${x1}`, class: kind }));
    }
    const pill = svg("g", { class: kind, "data-index": node.index ?? "bonus", transform: `translate(${left[node.depth]} ${y(node)})` });
    pill.append(svg("rect", { y: -HEIGHT / 2, width: width(node), height: HEIGHT, rx: 7 }));
    const label = svg("text", { x: PADDING, y: 4 }, node.label);
    label.append(svg("tspan", {}, percent(node)));
    pill.append(label);
    if (!node.kind) {
      pill.append(svg("title", {}, `${JSON.stringify(node.text)},${percent(node)} by the draft model, ${kind}`));
      if (kind === "rejected") pill.style.opacity = 0.72 + 0.28 * Math.sqrt(node.path);
    } else {
      pill.append(svg("title", {}, `${JSON.stringify(node.text)}, ${node.kind === "bonus" ? "the target’s own" : "the newest token known"}`));
    }
    pills.push(pill);
  }
  const [w, h] = [Math.ceil(left.at(-1) - GAP + 6), rows * ROW];
  element.setAttribute("viewBox", `0 0 ${w} ${h}`);
  element.setAttribute("width", w);
  element.setAttribute("height", h);
  // The lit path lies above the rest.
  edges.sort((a, b) => (a.getAttribute("class") === "rejected" ? 0 : 1) - (b.getAttribute("class") === "rejected" ? 0 : 1));
  element.replaceChildren(...edges, ...pills);
}

// East Asian characters are two cells wide.
function characterCells(text) {
  return [...text].reduce((cells, character) => cells + (/[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f300}-\u{1faff}]/u.test(character) ? 2 : 1), 0);
}
