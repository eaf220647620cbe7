-- Record that the results of the lines up to a position in the file are written. Those that had not ended when the batch
-- was closed are `unfinished`, of the `errored` ones.
local batch, token, from, position, succeeded, errored, unfinished = unpack(ARGV)
local key = batch_key(batch)
if not holds_batch(batch, token) then
  return 'lost'
elseif redis.call('HGET', key, 'written') == from then
  redis.call('HSET', key, 'written', position)
  redis.call('HINCRBY', key, 'succeeded', succeeded)
  redis.call('HINCRBY', key, 'errored', errored)
  redis.call('HINCRBY', key, 'unfinished', unfinished)
end
return 'ok'
