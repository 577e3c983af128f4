"""The Lua that runs inside the server: each script is one atomic step on the streams of one domain.

An entry of a stream has the fields `t` (finished_at, by the server's clock where the writer's is
wrong), `p` (the encoded trace) and `s` (1: it may be proposed to others), in this order, and the id
`SEQ-0`; earlier versions neither write nor read `s`.
SEQ is dense: it is the stream's last id plus one, which trimming does not change. A new stream
starts at the server's clock in microseconds, so a stream that was purged or lost never reuses an
id, and no old cursor skips its traces.
"""

WRONG_CLOCK_S = 10.0
"""A clock that differs from the server's by less counts as right: a call takes its time."""

_LAST_ID = """
local function last_id(key)
  if redis.call('EXISTS', key) == 0 then
    local now = redis.call('TIME')
    return now[1] * 1000000 + now[2]
  end
  local info = redis.call('XINFO', 'STREAM', key)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return tonumber(string.match(info[i + 1], '^%d+')) end
  end
end
"""

PUT = (
    _LAST_ID
    + """
-- KEYS: training stream, held-out stream.
-- ARGV: capacity of each stream, number of training entries, then t, p and s of every entry,
-- then the writer's time, by whose clock t is, and by how much that may be wrong.
-- Returns the number of entries stored.
local now = redis.call('TIME')
local behind = now[1] + now[2] / 1000000 - ARGV[#ARGV - 1]
local function at(t)
  if math.abs(behind) < tonumber(ARGV[#ARGV]) then return t end
  return string.format('%.6f', t + behind)
end
local function append(key, capacity, from, to)
  if from > to then return end
  local seq = last_id(key)
  for i = from, to, 3 do
    seq = seq + 1
    local id = string.format('%.0f-0', seq)
    redis.call('XADD', key, id, 't', at(ARGV[i]), 'p', ARGV[i + 1], 's', ARGV[i + 2])
  end
  redis.call('XTRIM', key, 'MINID', '=', string.format('%.0f-0', seq - capacity + 1))
end
local split = 3 + 3 * tonumber(ARGV[3])
append(KEYS[1], tonumber(ARGV[1]), 4, split)
append(KEYS[2], tonumber(ARGV[2]), split + 1, #ARGV - 2)
return (#ARGV - 5) / 3
"""
)

ADMIT = """
-- KEYS: the set of domains. ARGV: how many there may be, then the wanted domains.
-- Returns 1 for each domain that is admitted, else 0.
local admitted = {}
for i = 2, #ARGV do
  local known = redis.call('SISMEMBER', KEYS[1], ARGV[i])
  if known == 0 and redis.call('SCARD', KEYS[1]) < tonumber(ARGV[1]) then
    local added = redis.pcall('SADD', KEYS[1], ARGV[i])
    if type(added) == 'number' then known = 1 end
  end
  admitted[#admitted + 1] = known
end
return admitted
"""

SPAN = """
-- KEYS: a stream.
-- Returns first id, last id, number of entries ever added, t of the first entry;
-- an empty list when there is no such stream.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
local at = {}
for i = 1, #info, 2 do at[info[i]] = info[i + 1] end
local first = at['first-entry']
local last = string.match(at['last-generated-id'], '^%d+')
if not first then return {string.format('%.0f', last + 1), last, at['entries-added'], '0'} end
local oldest = first[2][1] == 't' and first[2][2] or '0'
return {string.match(first[1], '^%d+'), last, at['entries-added'], oldest}
"""

TIMES = """
-- KEYS: a stream. ARGV: highest id, lowest id, count.
-- Returns id and t of each entry, newest first, without the payloads.
local out = {}
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])) do
  out[#out + 1] = string.match(entry[1], '^%d+')
  out[#out + 1] = entry[2][1] == 't' and entry[2][2] or '0'
end
return out
"""

SHRINK = """
-- KEYS: streams of one domain. ARGV: least number of entries to keep, n.
-- Drops the oldest nth part of each stream; returns the number of entries dropped.
local dropped = 0
for _, key in ipairs(KEYS) do
  local num = redis.call('XLEN', key)
  local excess = math.min(math.ceil(num / ARGV[2]), num - ARGV[1])
  if excess > 0 then dropped = dropped + redis.call('XTRIM', key, 'MAXLEN', '=', num - excess) end
end
return dropped
"""

REGISTER = """
-- KEYS: a set. ARGV: members to add.
-- Errors are ignored: the PUT before it reports that memory is out.
redis.pcall('SADD', KEYS[1], unpack(ARGV))
return 1
"""

REMOVE = """
-- KEYS: streams of one domain. Deletes them; returns the number of entries they held.
local removed = 0
for _, key in ipairs(KEYS) do
  removed = removed + redis.call('XLEN', key)
  redis.call('UNLINK', key)
end
return removed
"""

MARK = """
-- KEYS: a stream, the sorted set of its unreadable entries. ARGV: ids of unreadable entries.
-- Adds them to the set, and removes those that left the stream.
-- Returns 1 for each id that is new to the set. Out of memory, no id is added.
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local gone_below = first and '(' .. string.match(first[1], '^%d+') or '+inf'
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', gone_below)
local is_new = {}
for i, seq in ipairs(ARGV) do
  local added = redis.pcall('ZADD', KEYS[2], seq, seq)
  is_new[i] = type(added) == 'number' and added or 0
end
return is_new
"""

COUNT = """
-- KEYS: a hash of counts. ARGV: a field, the number to add. Out of memory, nothing is added.
redis.pcall('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

DISCARD = """
-- KEYS: a hash. ARGV: a field, the value that was read from it.
-- Deletes the field if it still has this value; returns the number of fields deleted.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
