-- Request more tokens for a job of a batch that has used up its grant. Either the job has to wait: it is released, and
-- its attempt is not counted. Or return the tokens granted so far and its share: it continues at once, with a renewed
-- lease.
local id, token, lease, tokens, gain = unpack(ARGV)
local job = job_key(id)
local status, current, cancel, batch, share = unpack(
  redis.call('HMGET', job, 'status', 'token', 'cancel', 'batch', 'share'))
if status ~= 'in_progress' or current ~= token then
  return { 'lost' }
elseif cancel then
  finish_cancelled(id)
  return { 'cancelled' }
end
leave_share(batch, id, share)
redis.call('HSET', job, 'share', 'waiting', 'asked', tokens)
redis.call('ZADD', batch_key(batch) .. ':waiting', gain, id)
distribute_pool(batch)
local granted, now_share = unpack(redis.call('HMGET', job, 'granted', 'share'))
if now_share ~= 'waiting' then
  renew(id, lease)
  return { 'granted', granted, now_share }
end
uncount_attempt(id)
redis.call('HSET', job, 'lease', 0)
redis.call('ZREM', DUE, id)
set_status(id, 'queued')
append(id, 'job.queued', '{"reason":"batch","detail":"waits for its share of the batch\'s budget"}')
return { 'waiting' }
