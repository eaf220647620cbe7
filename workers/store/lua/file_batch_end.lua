-- End a batch, with the files of its results: triples of the field, the file, and its length; or with the errors (JSON)
-- for which it failed.
local batch, token, stage, errors = unpack(ARGV, 1, 4)
local key, now = batch_key(batch), now_ms()
if not holds_batch(batch, token) then
  return 'lost'
elseif redis.call('ZREM', OPEN_BATCHES, batch) == 0 then
  return 'ok' -- a repetition, since the first response was lost
end
local owner, input, keep = unpack(redis.call('HMGET', key, 'owner', 'input', 'output_keep'))
for i = 5, #ARGV, 3 do
  local field, file, bytes = unpack(ARGV, i, i + 2)
  record_file(file, owner, batch .. '_' .. field .. '.jsonl', 'batch_output', bytes, keep)
  redis.call('HSET', key, field .. '_file', file)
end
redis.call('HSET', key, 'stage', stage, 'at:' .. stage, seconds(now), 'errors', errors)
redis.call('SREM', open_batches_of(owner), batch)
redis.call('HINCRBY', file_key(input), 'readers', -1)
redis.call('DEL', key .. ':refused', key .. ':open')
redis.call('ZADD', ENDED_BATCHES, ms(now), batch)
leave_batch(batch, now)
return 'ok'
