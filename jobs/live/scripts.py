"""What happens to a live request in Redis, each step one Lua script: nobody sees half of one.

Times are seconds of the server's clock. A request's hash has the fields `spec`, `queue`, `tenant`, `deadline`, `state`,
`attempt`, `owner`, `lease`, `crashes`, `failures`, once it is called off `cancelled`, and `waits`: 1 while the worker
that has it has not begun it, so that it is not to blame when that worker dies.
"""

_NOW = """
local function stamp(seconds) return string.format('%.6f', seconds) end
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
"""

_KEEP = """
local function keep(key, seconds)
  local milliseconds = math.ceil(seconds * 1000)
  if redis.call('PTTL', key) < milliseconds then redis.call('PEXPIRE', key, milliseconds) end
end
"""

# KEYS: request, open, tenant. ARGV: id, spec, queue, tenant, deadline, ttl, state, attempt, owner, lease seconds,
# crashes, failures. 1 when it was not known.
REGISTER = (
    _NOW
    + _KEEP
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local deadline, lease = tonumber(ARGV[5]), now + tonumber(ARGV[10])
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'queue', ARGV[3], 'tenant', ARGV[4], 'deadline', ARGV[5],
  'state', ARGV[7], 'attempt', ARGV[8], 'owner', ARGV[9], 'lease', stamp(lease), 'crashes', ARGV[11],
  'failures', ARGV[12])
redis.call('ZADD', KEYS[2], stamp(lease), ARGV[1])
redis.call('ZADD', KEYS[3], stamp(deadline), ARGV[1])
for _, key in ipairs(KEYS) do keep(key, math.max(deadline - now, 0) + tonumber(ARGV[6])) end
return 1
"""
)

# KEYS: request. ARGV: id, channel, prefix of tenant keys. 1 when it had not ended.
CANCEL = """
local state, tenant = unpack(redis.call('HMGET', KEYS[1], 'state', 'tenant'))
if not state or state == 'ended' then return 0 end
redis.call('HSET', KEYS[1], 'cancelled', 1)
redis.call('ZREM', ARGV[3] .. tenant, ARGV[1])
redis.call('PUBLISH', ARGV[2], ARGV[1])
return 1
"""

# KEYS: request, open. ARGV: id, owner, lease seconds.
# The verdict, and where it is "claimed": attempt, crashes, failures, whether cancelled, now, spec.
CLAIM = (
    _NOW
    + """
local state, lease, waits = unpack(redis.call('HMGET', KEYS[1], 'state', 'lease', 'waits'))
if not state or state == 'ended' then
  redis.call('ZREM', KEYS[2], ARGV[1])
  return {'ended'}
end
if state == 'running' then
  if tonumber(lease) > now then return {'taken'} end
  if waits ~= '1' then redis.call('HINCRBY', KEYS[1], 'crashes', 1) end
end
local attempt = redis.call('HINCRBY', KEYS[1], 'attempt', 1)
local ends = stamp(now + tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[2], 'lease', ends, 'waits', 0)
redis.call('ZADD', KEYS[2], ends, ARGV[1])
local crashes, failures, cancelled, spec =
  unpack(redis.call('HMGET', KEYS[1], 'crashes', 'failures', 'cancelled', 'spec'))
return {'claimed', attempt, tonumber(crashes), tonumber(failures), cancelled and 1 or 0, stamp(now), spec}
"""
)

# KEYS: request. ARGV: attempt.
BEGIN = """
if redis.call('HGET', KEYS[1], 'attempt') == ARGV[1] then redis.call('HSET', KEYS[1], 'waits', 0) end
"""

# KEYS: open, requests. ARGV: lease seconds, then id, attempt and "0" or "1" (whether it waits) of each. A verdict for
# each.
RENEW = (
    _NOW
    + """
local ends, verdicts = stamp(now + tonumber(ARGV[1])), {}
for index = 2, #KEYS do
  local at = 3 * index - 4
  local key, id, mine = KEYS[index], ARGV[at], ARGV[at + 1]
  local state, attempt, cancelled, waited = unpack(redis.call('HMGET', key, 'state', 'attempt', 'cancelled', 'waits'))
  if not state then
    verdicts[index - 1] = 'gone'
  elseif attempt ~= mine or state == 'ended' then
    verdicts[index - 1] = 'lost'
  else
    -- The lease had run out, but nobody has taken the request yet: it was no crash.
    if state == 'queued' and waited ~= '1' then redis.call('HINCRBY', key, 'crashes', -1) end
    redis.call('HSET', key, 'state', 'running', 'lease', ends, 'waits', ARGV[at + 2])
    redis.call('ZADD', KEYS[1], ends, id)
    verdicts[index - 1] = cancelled and 'cancelled' or 'held'
  end
end
return verdicts
"""
)

# KEYS: request, open. ARGV: id, attempt, failures to add. 1 when it was still this attempt's.
RELEASE = (
    _NOW
    + """
local state, attempt = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt'))
if state ~= 'running' or attempt ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'queued')
redis.call('HINCRBY', KEYS[1], 'failures', ARGV[3])
redis.call('ZADD', KEYS[2], stamp(now), ARGV[1])
return 1
"""
)

# KEYS: request, open, tenant. ARGV: id, attempt, ttl. 1 when it was still this attempt's.
END = """
local attempt = redis.call('HGET', KEYS[1], 'attempt')
if attempt and attempt ~= ARGV[2] then return 0 end
if attempt then
  redis.call('HSET', KEYS[1], 'state', 'ended')
  redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[3]) * 1000))
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
"""

# KEYS: open. ARGV: prefix of request keys, seconds after which a bell that nobody heard is lost, whether bells wait to
# be heard, how many requests to look at. The ids to ring for: those whose lease has run out, and those who wait and
# whose bell was lost.
SWEEP = (
    _NOW
    + """
local lost_before, rung = now - tonumber(ARGV[2]), {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', stamp(now), 'LIMIT', 0, ARGV[4])) do
  local key = ARGV[1] .. id
  local state, waits = unpack(redis.call('HMGET', key, 'state', 'waits'))
  if not state or state == 'ended' then
    redis.call('ZREM', KEYS[1], id)
  elseif state == 'running' then
    redis.call('HSET', key, 'state', 'queued')
    if waits ~= '1' then redis.call('HINCRBY', key, 'crashes', 1) end
    rung[#rung + 1] = id
  elseif ARGV[3] == '0' and tonumber(redis.call('ZSCORE', KEYS[1], id)) < lost_before then
    rung[#rung + 1] = id
  end
end
for _, id in ipairs(rung) do redis.call('ZADD', KEYS[1], stamp(now), id) end
return rung
"""
)
