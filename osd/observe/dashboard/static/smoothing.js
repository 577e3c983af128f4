// The line through noisy points.

const KEEP = 0.6; // of the weight a point has, what the point before it has
const ENOUGH = 10; // tested tokens with which a point weighs 1
const LEAST = 0.25; // what a point weighs at least

/**
 * Each point's mean with those before it, which weigh less and less. `tested` = tokens per point: few of them weigh
 * less, but never many more: where a draft fails, and little of it is tested then, what was before would hold the line up.
 */
export function smooth(values, tested) {
  let sum = 0, whole = 0;
  return values.map((value, i) => {
    sum *= KEEP;
    whole *= KEEP;
    if (value === null) return null;
    const weight = tested ? Math.min(1, Math.max(LEAST, tested[i] / ENOUGH)) : 1;
    sum += weight * value;
    whole += weight;
    return sum / whole;
  });
}
