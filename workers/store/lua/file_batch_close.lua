-- Let a batch end early, since it is 'cancelled' or 'expired', or its key is 'revoked': no line of it is submitted any more.
local batch, reason = unpack(ARGV)
local key = batch_key(batch)
local stage = redis.call('HGET', key, 'stage')
if stage == 'validating' or stage == 'in_progress' then
  if redis.call('HSETNX', key, 'closing', reason) == 1 then
    redis.call('HSET', key, 'at:closing', seconds(now_ms()))
  end
  redis.call('HSET', key, 'cancel', 1) -- grants of the shared budget end, too
end
return 'ok'
