"""What the publisher runs inside Redis: one call a flush for all streams, and one to read what earlier attempts wrote.

Needs nothing newer than Redis 5. Not for a Redis cluster: the keys of one call lie in many slots.
"""

from .keys import FRAMES_PREFIX, STREAM_PREFIX, WRITER_PREFIX

# ARGV: the TTL in seconds, then operations of different lengths, each `kind, stream id, attempt, reader` and
#   claim:  number of the last token, "0" or "1" (whether the stream should have ended)
#   tokens: first, last, tokens, texts, logprobs or ""
#   first:  the same, and the prompt's logprobs
#   end:    last, finish_reason, text, usage or "", error or "", stop_reason or ""
#   renew:  nothing
# Answers with a pair for each operation that was refused: its number (from 1) and why: `stale`, the id of the stream's
# newest entry (`0-0` for none) or `error …`. What an operation does for its stream is done entirely or not at all.
_NAMES = f"""
local STREAM, WRITER, FRAMES = '{STREAM_PREFIX}', '{WRITER_PREFIX}', '{FRAMES_PREFIX}'
"""
FLUSH = (
    _NAMES
    + """
local call, ttl = redis.call, ARGV[1]
local frames, refused = {}, {}

-- The id of the newest entry, for the attempt that may write; claims the stream for it.
local function newest(id, attempt)
  local writer = call('GET', WRITER .. id)
  if writer ~= attempt then
    if writer and tonumber(writer) > tonumber(attempt) then return 'stale' end
    call('SET', WRITER .. id, attempt, 'EX', ttl)
  end
  local entry = call('XREVRANGE', STREAM .. id, '+', '-', 'COUNT', 1)[1]
  return entry and entry[1] or '0-0'
end

local function renew(id)
  call('EXPIRE', STREAM .. id, ttl)
  call('EXPIRE', WRITER .. id, ttl)
end

local function tell(id, reader, entry, fields)
  call('PUBLISH', STREAM .. id, entry)
  if reader == '' then return end
  local frame = frames[reader]
  if not frame then frame = {} frames[reader] = frame end
  frame[#frame + 1] = '["' .. id .. '","' .. entry .. '",{' .. fields .. '}]'
end

local function claim(id, attempt, reader, at)
  local found, expected = newest(id, attempt), ARGV[at + 4] .. '-' .. ARGV[at + 5]
  if found ~= expected then return found end
  renew(id)
end

local function tokens(id, attempt, reader, at, prompt)
  local first, tokens, texts, logprobs = ARGV[at + 4], ARGV[at + 6], ARGV[at + 7], ARGV[at + 8]
  local found, entry = newest(id, attempt), ARGV[at + 5] .. '-0'
  if found ~= (first - 1) .. '-0' then return found end
  local items = {'first', first, 'tokens', tokens, 'texts', texts}
  local fields = '"first":' .. first .. ',"tokens":' .. tokens .. ',"texts":' .. texts
  if logprobs ~= '' then
    items[7], items[8] = 'logprobs', logprobs
    fields = fields .. ',"logprobs":' .. logprobs
  end
  if prompt then
    items[#items + 1], items[#items + 2] = 'prompt_logprobs', prompt
    fields = fields .. ',"prompt_logprobs":' .. prompt
  end
  call('XADD', STREAM .. id, entry, unpack(items))
  if found == '0-0' then renew(id) end
  tell(id, reader, entry, fields)
end

local function begin(id, attempt, reader, at)
  return tokens(id, attempt, reader, at, ARGV[at + 9])
end

local function finish(id, attempt, reader, at)
  local last, reason, text, usage, failure = ARGV[at + 4], ARGV[at + 5], ARGV[at + 6], ARGV[at + 7], ARGV[at + 8]
  local found, entry = newest(id, attempt), last .. '-1'
  if found ~= last .. '-0' then return found end
  local items = {'finish_reason', reason, 'text', text}
  local fields = '"finish_reason":' .. cjson.encode(reason) .. ',"text":' .. cjson.encode(text)
  if usage ~= '' then
    items[5], items[6] = 'usage', usage
    fields = fields .. ',"usage":' .. usage
  end
  if failure ~= '' then
    items[#items + 1], items[#items + 2] = 'error', failure
    fields = fields .. ',"error":' .. failure
  end
  local stopped = ARGV[at + 9]
  if stopped ~= '' then
    items[#items + 1], items[#items + 2] = 'stop_reason', stopped
    fields = fields .. ',"stop_reason":' .. stopped
  end
  call('XADD', STREAM .. id, entry, unpack(items))
  renew(id)
  tell(id, reader, entry, fields)
end

local kinds = {
  claim = {claim, 6}, tokens = {tokens, 9}, first = {begin, 10}, ['end'] = {finish, 10}, renew = {renew, 4}
}
local at, number = 2, 0
while at <= #ARGV do
  local kind = kinds[ARGV[at]]
  number = number + 1
  local ran, refusal = pcall(kind[1], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], at)
  if not ran then refusal = 'error ' .. (type(refusal) == 'table' and refusal.err or tostring(refusal)) end
  if refusal then
    refused[#refused + 1] = number
    refused[#refused + 1] = refusal
  end
  at = at + kind[2]
end
for reader, frame in pairs(frames) do
  call('PUBLISH', FRAMES .. reader, '[' .. table.concat(frame, ',') .. ']')
end
return refused
"""
)

# ARGV: the TTL in seconds, then pairs of a stream id and an attempt. Answers a list a stream: empty when a later
# attempt has claimed it; otherwise tokens, texts, logprobs and the prompt's as JSON arrays, the newest id and its
# fields.
RECOVER = (
    _NAMES
    + """
local answers = {}

local function joined(lists)
  return '[' .. table.concat(lists, ',') .. ']'
end

local function recover(id, attempt)
  local writer = redis.call('GET', WRITER .. id)
  if writer and tonumber(writer) > tonumber(attempt) then return {} end
  redis.call('SET', WRITER .. id, attempt, 'EX', ARGV[1])
  redis.call('EXPIRE', STREAM .. id, ARGV[1])
  local lists, newest = {tokens = {}, texts = {}, logprobs = {}, prompt_logprobs = {}}, {'0-0', {}}
  for _, entry in ipairs(redis.call('XRANGE', STREAM .. id, '-', '+')) do
    local fields = entry[2]
    for at = 1, #fields, 2 do
      local list = lists[fields[at]]
      if list then list[#list + 1] = string.sub(fields[at + 1], 2, -2) end
    end
    newest = entry
  end
  return {
    joined(lists.tokens), joined(lists.texts), joined(lists.logprobs), joined(lists.prompt_logprobs),
    newest[1], newest[2]
  }
end

for at = 2, #ARGV, 2 do
  answers[#answers + 1] = recover(ARGV[at], ARGV[at + 1])
end
return answers
"""
)
