"""What happens to a live request in Redis, each step one Lua script: nobody sees half of one.

Times are seconds of the server's clock. A request's hash has the fields `spec`, `queue`, `tenant`, `deadline`, `state`,
`attempt`, `owner`, `lease`, `crashes`, `failures`, once it is called off `cancelled`, `unread` once some worker could
not read it, and `waits`: 1 while the worker that has it has not begun it, so that it is not to blame when that worker
dies.
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

# Of each request KEYS: request, open, tenant. ARGV: id, spec, queue, tenant, deadline, ttl, state, attempt, owner,
# lease seconds, crashes, failures. One that is known stays as it is.
_REGISTER = (
    _NOW
    + _KEEP
    + """
local function register(request, open, tenant, id, spec, queue, name, deadline, ttl, state, attempt, owner, lease,
    crashes, failures)
  if redis.call('EXISTS', request) == 1 then return end
  local ends = stamp(now + tonumber(lease))
  redis.call('HSET', request, 'spec', spec, 'queue', queue, 'tenant', name, 'deadline', deadline, 'state', state,
    'attempt', attempt, 'owner', owner, 'lease', ends, 'crashes', crashes, 'failures', failures)
  redis.call('ZADD', open, ends, id)
  redis.call('ZADD', tenant, stamp(tonumber(deadline)), id)
  local seconds = math.max(tonumber(deadline) - now, 0) + tonumber(ttl)
  keep(request, seconds)
  keep(open, seconds)
  keep(tenant, seconds)
end
"""
)
REGISTER = (
    _REGISTER
    + """
for number = 0, #KEYS / 3 - 1 do
  register(KEYS[3 * number + 1], KEYS[3 * number + 2], KEYS[3 * number + 3],
    unpack(ARGV, 12 * number + 1, 12 * number + 12))
end
"""
)

# As REGISTER, for groups of requests each of which is taken as a whole or not at all. ARGV: how many may be open, then
# of each request, behind its own twelve, how many are in the group that begins with it; 0 within one. 1 for each that
# was taken. A group that is larger than the limit is taken where nothing else is open.
SUBMIT = (
    _REGISTER
    + """
local most, taken, refused = tonumber(ARGV[1]), {}, false
for number = 0, #KEYS / 3 - 1 do
  local request, open, tenant = unpack(KEYS, 3 * number + 1, 3 * number + 3)
  local size = tonumber(ARGV[13 * number + 14])
  if size > 0 then
    local others = redis.call('ZCARD', open)
    refused = others > 0 and others + size > most and redis.call('EXISTS', request) == 0
  end
  if not refused then register(request, open, tenant, unpack(ARGV, 13 * number + 2, 13 * number + 13)) end
  taken[number + 1] = refused and 0 or 1
end
return taken
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

# KEYS: open, requests. ARGV: owner, lease seconds, then the id of each.
# Of each that is to be had: id, attempt, crashes, failures, whether cancelled, now, spec. Others have ended, or
# somebody has them.
CLAIM = (
    _NOW
    + """
local ends, claimed = stamp(now + tonumber(ARGV[2])), {}

local function claim(key, id)
  local state, lease, waits, owner = unpack(redis.call('HMGET', key, 'state', 'lease', 'waits', 'owner'))
  if not state or state == 'ended' then
    redis.call('ZREM', KEYS[1], id)
    return
  end
  if state == 'running' then
    if tonumber(lease) > now then return end
    -- A worker that takes its own again was starved.
    if waits ~= '1' and owner ~= ARGV[1] then redis.call('HINCRBY', key, 'crashes', 1) end
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'running', 'owner', ARGV[1], 'lease', ends, 'waits', 0)
  redis.call('ZADD', KEYS[1], ends, id)
  local crashes, failures, cancelled, spec =
    unpack(redis.call('HMGET', key, 'crashes', 'failures', 'cancelled', 'spec'))
  claimed[#claimed + 1] =
    {id, attempt, tonumber(crashes), tonumber(failures), cancelled and 1 or 0, stamp(now), spec}
end

for index = 2, #KEYS do claim(KEYS[index], ARGV[index + 1]) end
return claimed
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

# KEYS: request, open. ARGV: id, attempt, failures to add, 1 if it could not be read. 1 when it was still this
# attempt's.
RELEASE = (
    _NOW
    + """
local state, attempt = unpack(redis.call('HMGET', KEYS[1], 'state', 'attempt'))
if state ~= 'running' or attempt ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'queued')
redis.call('HINCRBY', KEYS[1], 'failures', ARGV[3])
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'unread', 1) end
redis.call('ZADD', KEYS[2], stamp(now), ARGV[1])
return 1
"""
)

# KEYS: request, open, tenant, the writer of each of its streams. ARGV: id, attempt, ttl, and the spec that is kept of a
# request that has ended, where that is less. 1 when it was still this attempt's, and not refused: after Redis had
# forgotten the request its attempts are counted anew, while one with a higher number may have gone on with the streams.
# Then there is to be another, with a number above that.
END = (
    _NOW
    + """
local attempt = redis.call('HGET', KEYS[1], 'attempt')
if attempt and attempt ~= ARGV[2] then return 0 end
local newest = tonumber(ARGV[2])
for index = 4, #KEYS do newest = math.max(newest, tonumber(redis.call('GET', KEYS[index]) or 0)) end
if attempt and newest > tonumber(attempt) then
  redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', newest)
  redis.call('ZADD', KEYS[2], stamp(now), ARGV[1])
  return 0
end
if attempt then
  redis.call('HSET', KEYS[1], 'state', 'ended')
  if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'spec', ARGV[4]) end
  redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[3]) * 1000))
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
"""
)

# KEYS: open, bells. ARGV: prefix of request keys, seconds after which a bell that nobody heard is lost, how many
# requests to look at, who does. The ids to ring for: those whose lease has run out and, where no bell waits to be
# heard, those who wait and whose bell was lost. Not past its deadline one that some worker cannot read: whoever could
# have answered it has heard its bell by then.
SWEEP = (
    _NOW
    + """
local lost_before, rung = now - tonumber(ARGV[2]), {}
local all_heard = redis.call('LLEN', KEYS[2]) == 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', stamp(now), 'LIMIT', 0, ARGV[3])) do
  local key = ARGV[1] .. id
  local state, waits, owner, unread, deadline =
    unpack(redis.call('HMGET', key, 'state', 'waits', 'owner', 'unread', 'deadline'))
  if not state or state == 'ended' then
    redis.call('ZREM', KEYS[1], id)
  elseif state == 'running' then
    redis.call('HSET', key, 'state', 'queued')
    if owner == ARGV[4] then
      -- Its worker is alive, and was starved for longer than the lease. As if it had waited: no crash to take back.
      redis.call('HSET', key, 'waits', 1)
    elseif waits ~= '1' then
      redis.call('HINCRBY', key, 'crashes', 1)
    end
    rung[#rung + 1] = id
  elseif unread and tonumber(deadline) < now then
    redis.call('ZREM', KEYS[1], id)
  elseif all_heard and tonumber(redis.call('ZSCORE', KEYS[1], id)) < lost_before then
    rung[#rung + 1] = id
  end
end
for _, id in ipairs(rung) do redis.call('ZADD', KEYS[1], stamp(now), id) end
return rung
"""
)
