-- Begin to join the results of a batch, all of which are written.
local batch, token = unpack(ARGV)
if not holds_batch(batch, token) then
  return 'lost'
end
redis.call('HSET', batch_key(batch), 'stage', 'finalizing')
redis.call('HSETNX', batch_key(batch), 'at:finalizing', seconds(now_ms()))
return 'ok'
