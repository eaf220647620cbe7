-- Bring a job back from the archive: its hash, and its stream as triples of an entry's id, the number of its strings,
-- and these. The row in the archive is removed by the next pass that moves jobs.
local id, count = ARGV[1], tonumber(ARGV[2])
local job = job_key(id)
if redis.call('EXISTS', job) == 1 then
  return 0
end
for i = 3, 2 + count, 2 do
  redis.call('HSET', job, ARGV[i], ARGV[i + 1])
end
local i = 3 + count
while i <= #ARGV do
  local entry, strings = ARGV[i], tonumber(ARGV[i + 1])
  redis.call('XADD', job .. ':log', entry, unpack(ARGV, i + 2, i + 1 + strings))
  for k = i + 2, i + 1 + strings, 2 do
    if ARGV[k] == 'key' then
      redis.call('SADD', job .. ':keys', ARGV[k + 1])
    end
  end
  i = i + 2 + strings
end
local n, status, finished, failure, idempotency = unpack(
  redis.call('HMGET', job, 'n', 'status', 'finished', 'error', 'idempotency'))
if status ~= 'failed' then
  redis.call('DEL', job .. ':keys')
end
set_in_list(id, '', n)
set_in_list(id, ':' .. status, n)
set_in_list(id, ':ended', ms(number(finished) * 1000))
local reason = failure and cjson.decode(failure)
if status == 'failed' and type(reason) == 'table' and reason.code == 'max_attempts' then
  set_in_list(id, ':dead', n)
end
if idempotency and redis.call('HGET', idempotency, 'job') == id then
  redis.call('HDEL', idempotency, 'archived')
end
redis.call('HSET', ARCHIVING, id, 'restored')
return 1
