// Asks once a second, and shows what it is told.

import { drawChart, html, setBar } from "./draw.js";
import { History, ratio } from "./history.js";
import { drawTree, visible } from "./tree.js";

const POLL_MS = 1000, TIMEOUT_MS = 4000, RECENT_SECONDS = 5, WINDOW_SECONDS = 60;
const PARTS = ["draft", "transfer", "verify", "host"];

const history = new History();
const by = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
let heardAt = 0, figures = false, shownDraft = null, held = false;

function show(id, value, digits = 0, unit = "") {
  const none = value === null || value === undefined;
  const element = by(id);
  element.textContent = none ? "no traffic" : (digits ? value.toFixed(digits) : whole.format(Math.round(value))) + unit;
  element.classList.toggle("none", none);
}

function setHealth(service, state, text) {
  const element = by(`health-${service}`);
  const before = element.dataset.state;
  element.dataset.state = state;
  element.lastElementChild.textContent = text;
  // Said aloud only when it changes.
  if (before !== state && before !== "unknown") by("announcement").textContent = `${service}: ${text}`;
}

function showHealth(state) {
  const { verifier, drafters, gateway } = state;
  setHealth("gateway", "good", "serving");
  setHealth("verifier", verifier.ready ? "good" : "bad", verifier.ready ? "serving" : verifier.trouble || "does not answer");
  if (!drafters) setHealth("drafter", "unknown", "not known");
  else if (!drafters.expected) setHealth("drafter", "unknown", "none configured");
  else if (!drafters.names.length) setHealth("drafter", "bad", "none connected, decoding plainly");
  else setHealth("drafter", "good", drafters.names.length > 1 ? `${drafters.names.length} connected` : "connected");
  by("health-drafter").title = drafters ? drafters.names.join(", ") : "";
  by("health-verifier").title = verifier.address;
  by("model").textContent = verifier.model ?? "";
  by("in-flight").textContent = gateway.in_flight;
  by("version").textContent = `Tandem ${state.version}`;
}

function showThroughput(load) {
  const recent = history.within(RECENT_SECONDS);
  show("throughput", recent && ratio(recent.emitted_tokens, recent.seconds) ? recent.emitted_tokens / recent.seconds : null, 1);
  show("emitted", load.emitted_tokens);
  const points = history.throughput();
  const seconds = Math.min(History.seconds, Math.max(WINDOW_SECONDS, points[0]?.[0] ?? 0));
  drawChart(by("throughput-chart"), points, seconds);
  const peak = Math.max(0, ...points.map(([, value]) => value));
  const span = seconds > WINDOW_SECONDS ? `last ${(seconds / 60).toFixed(1)} min` : "last minute";
  by("throughput-peak").textContent = peak ? `peak of the ${span} ${whole.format(Math.round(peak))}` : span;
}

function showAcceptance(load) {
  const window = history.within(WINDOW_SECONDS) ?? { drafts: 0 };
  show("length", ratio(window.drafts + window.accepted_tokens, window.drafts), 2);
  show("length-total", ratio(load.drafts + load.accepted_tokens, load.drafts), 2);
  const percent = (accepted, drafted) => (drafted > 0 ? (100 * accepted) / drafted : null);
  show("rate", percent(window.accepted_tokens, window.drafted_tokens), 1, " %");
  show("rate-total", percent(load.accepted_tokens, load.drafted_tokens), 1, " %");
  const live = window.drafts > 0;
  const [counts, drafts] = live ? [window.accepted_per_position, window.drafts] : [load.accepted_per_position, load.drafts];
  const list = by("positions");
  while (list.children.length > counts.length) list.lastChild.remove();
  counts.forEach((count, position) => {
    if (!list.children[position]) {
      const item = html("li"), bar = html("span", "bar");
      bar.append(html("i", "lit"));
      item.append(html("span", "", position + 1), bar, html("span"));
      list.append(item);
    }
    const share = ratio(count, drafts) ?? 0;
    setBar(list.children[position], { lit: share });
    list.children[position].lastChild.textContent = `${(100 * share).toFixed(1)} %`;
  });
  by("positions-note").textContent = !load.drafts
    ? "no traffic"
    : `of ${whole.format(drafts)} drafts ${live ? "in the last minute" : "since start; none in the last minute"}`;
}

function showChoice(speculation, names) {
  const modes = history.modes();
  if (!speculation) {
    by("choice").textContent = "off";
    by("reason").textContent = "nothing to draft with is configured";
    return by("outlook").replaceChildren();
  }
  const { mode, nodes, reason } = speculation;
  by("choice").textContent = mode === "off" ? "Plain decoding" : `Trees of ${nodes}`;
  by("reason").textContent = reason;
  by("choice-strip").replaceChildren(...modes.map((past) => html("i", past)));
  const drafting = modes.filter((past) => past !== "off").length / modes.length;
  const minutes = Math.ceil(modes.length / 60);
  by("choice-note").textContent = `drafts asked for in ${Math.round(100 * drafting)} % of the last ${minutes > 1 ? `${minutes} minutes` : "minute"}`;
  const ms = (us) => `${(us / 1000).toFixed(1)} ms`;
  const rows = speculation.gain
    ? [
        ["predicted gain", `${speculation.gain.toFixed(2)} ×`],
        ["tokens a step", speculation.expected_tokens.toFixed(2)],
        ["waiting for drafts", ms(speculation.draft_us)],
        ["step that verifies", ms(speculation.step_us)],
        ["plain step", ms(speculation.plain_step_us)],
      ]
    : [["predicted gain", names.length ? "not known yet" : "no drafter"]];
  by("outlook").replaceChildren(...rows.flatMap(([name, value]) => [html("dt", "", name), html("dd", "", value)]));
}

function showSteps(steps) {
  const kinds = Object.entries(steps).filter(([, step]) => step);
  const total = (step) => PARTS.reduce((sum, part) => sum + step[`${part}_us`], 0);
  const most = Math.max(1, ...kinds.map(([, step]) => total(step)));
  const rows = kinds.map(([kind, step]) => {
    const row = html("div"), head = html("p"), bar = html("div", "bar");
    head.append(html("span", "", `${kind}, ${step.rows} rows`), html("span", "", `${(total(step) / 1000).toFixed(1)} ms`));
    bar.append(...PARTS.map((part) => html("i", part)));
    setBar(bar, Object.fromEntries(PARTS.map((part) => [part, step[`${part}_us`] / most])));
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", PARTS.map((part) => `${part} ${(step[`${part}_us`] / 1000).toFixed(1)} ms`).join(", "));
    bar.title = bar.getAttribute("aria-label");
    row.append(head, bar);
    return row;
  });
  by("steps").replaceChildren(...(rows.length ? rows : [html("p", "none", "no traffic")]));
}

function showMemory(load) {
  const { kv_used: used, kv_cached: cached, kv_total: total } = load;
  setBar(by("kv"), { used: used / total, cached: cached / total });
  by("kv-text").textContent = `${whole.format(used)} blocks used, ${whole.format(cached)} cached, ${whole.format(total - used - cached)} free`;
  by("graphs").textContent = load.graph_buckets
    ? `${load.graph_buckets_captured} of ${load.graph_buckets} buckets captured`
    : "none: steps have the shapes they need";
}

function showDraft(draft) {
  const text = by("tree-text"), scroll = by("tree-scroll"), last = draft.last;
  scroll.hidden = by("hold").hidden = !last;
  if (!draft.shown || !last) {
    shownDraft = null;
    text.textContent = draft.shown ? "no traffic" : "not shown: set verifier.show_last_draft";
    return;
  }
  if (held || shownDraft === last.number) return;
  shownDraft = last.number;
  const accepted = last.nodes.slice(1).filter((node) => node.accepted);
  const code = (token) => html("code", "", visible(token));
  const mark = html("mark");
  mark.append(...accepted.flatMap((node, index) => (index ? [" ", code(node.text)] : [code(node.text)])));
  text.replaceChildren(
    `${accepted.length} of ${last.nodes.length - 1} accepted behind `,
    code(last.nodes[0].text),
    accepted.length ? ": " : "",
    mark,
    "; then the target’s own ",
    code(last.bonus),
  );
  drawTree(by("tree"), last);
}

function showFreshness() {
  const seconds = Math.round((performance.now() - heardAt) / 1000);
  const stale = heardAt === 0 || seconds > 3;
  document.body.toggleAttribute("data-stale", stale || !figures);
  by("fresh").textContent = heardAt === 0 ? "not heard yet" : stale ? `not heard for ${seconds} s` : "live";
  if (stale && heardAt) {
    setHealth("gateway", "bad", "does not answer");
    setHealth("verifier", "unknown", "not known");
    setHealth("drafter", "unknown", "not known");
  }
}

async function poll() {
  try {
    const reply = await fetch("state.json", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (reply.ok) {
      const state = await reply.json();
      heardAt = performance.now();
      showHealth(state);
      figures = state.load !== null;
      if (figures) {
        history.add(state);
        by("running").textContent = whole.format(state.load.running);
        by("waiting").textContent = whole.format(state.load.waiting);
        showThroughput(state.load);
        showAcceptance(state.load);
        showChoice(state.speculation, state.drafters.names);
        showSteps(state.steps);
        showMemory(state.load);
        showDraft(state.draft);
      }
    }
  } catch (error) {
    // Not reached, or cut off: the next poll tries again, and the page says since when.
    if (error instanceof TypeError === false && error.name !== "TimeoutError") console.error(error);
  }
  showFreshness();
  setTimeout(poll, POLL_MS);
}

by("hold").addEventListener("click", () => {
  held = !held;
  by("hold").setAttribute("aria-pressed", held);
});
poll();
