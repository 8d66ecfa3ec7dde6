// Small drawings. Text only ever goes in as text.

export function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export function html(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// points: [seconds ago, value], oldest first.
export function drawChart(element, points, seconds) {
  const most = Math.max(1, ...points.map(([, value]) => value)) * 1.08;
  const at = ([ago, value]) => `${(1000 * (1 - ago / seconds)).toFixed(1)} ${(100 - (98 * value) / most).toFixed(1)}`;
  element.setAttribute("viewBox", "0 0 1000 100");
  const base = svg("path", { class: "base", d: "M0 99.5H1000" });
  if (points.length < 2) return element.replaceChildren(base);
  const line = "M" + points.map(at).join("L");
  const [first, last] = [at(points[0]).split(" ")[0], at(points.at(-1)).split(" ")[0]];
  element.replaceChildren(base, svg("path", { class: "area", d: `${line}L${last} 100L${first} 100Z` }), svg("path", { class: "line", d: line }));
}

// Widths in percent go to the element's own style: the page's policy allows no style attributes.
export function setBar(element, parts) {
  for (const [className, share] of Object.entries(parts)) {
    element.querySelector(`.${className}`).style.width = `${(100 * share).toFixed(2)}%`;
  }
}
