// What was heard, and rates between two moments of it. Counters of another verifier start a new history.

const KEEP_SECONDS = 300;

const COUNTERS = ["emitted_tokens", "drafts", "drafted_tokens", "accepted_tokens"];

export class History {
  constructor() {
    this.samples = [];
  }

  add(state) {
    const sample = { clock: state.clock, load: state.load, mode: state.speculation?.mode };
    const last = this.samples.at(-1);
    if (last && (sample.clock <= last.clock || COUNTERS.some((name) => sample.load[name] < last.load[name]))) {
      this.samples = [];
    }
    this.samples.push(sample);
    while (this.samples[0].clock < sample.clock - KEEP_SECONDS) this.samples.shift();
  }

  // What happened within the last `seconds`, or since the page is open; null before there are two moments.
  within(seconds) {
    const last = this.samples.at(-1);
    const first = this.samples.find((sample) => sample.clock >= last.clock - seconds - 0.5);
    if (!last || first === last) return null;
    const change = { seconds: last.clock - first.clock };
    for (const name of COUNTERS) change[name] = last.load[name] - first.load[name];
    change.accepted_per_position = last.load.accepted_per_position.map(
      (count, position) => count - (first.load.accepted_per_position[position] ?? 0),
    );
    return change;
  }

  // [seconds ago, tokens per second] of every interval, oldest first.
  throughput() {
    const now = this.samples.at(-1)?.clock;
    return this.samples.slice(1).map((sample, index) => {
      const before = this.samples[index];
      const tokens = sample.load.emitted_tokens - before.load.emitted_tokens;
      return [now - sample.clock, tokens / (sample.clock - before.clock)];
    });
  }

  modes() {
    return this.samples.map((sample) => sample.mode).filter(Boolean);
  }

  static get seconds() {
    return KEEP_SECONDS;
  }
}

// a / b, or null where there is nothing to divide by.
export function ratio(a, b) {
  return b > 0 ? a / b : null;
}
