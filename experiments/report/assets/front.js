// The points that no other point beats, and which points are drawn when there are many.

const MOST_DRAWN = 2500;

/** The places of the front in two columns, from left to right; none without a better direction. */
function frontOf(x, y, candidates) {
  if (!x.better || !y.better) return [];
  const signX = x.better === "lower" ? 1 : -1;
  const signY = y.better === "lower" ? 1 : -1;
  const known = candidates
    .filter((i) => drawn(x, i) !== null && drawn(y, i) !== null)
    .map((i) => [signX * valueOf(x, i), signY * valueOf(y, i), i])
    .sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const found = [];
  let best = null;
  for (const point of known) {
    const ties = best !== null && point[0] === best[0] && point[1] === best[1];
    if (best === null || point[1] < best[1] || ties) {
      best = point;
      found.push(point[2]);
    }
  }
  return found;
}

/** At most MOST_DRAWN of the points: the front, and an even draw of all others. */
function sampled(points, front) {
  if (points.length <= MOST_DRAWN) return points;
  const kept = new Set(front.slice(0, MOST_DRAWN));
  const rest = points.filter((i) => !kept.has(i));
  const room = MOST_DRAWN - kept.size;
  for (let k = 0; k < room; k += 1) kept.add(rest[Math.floor((k * rest.length) / room)]);
  return points.filter((i) => kept.has(i));
}
