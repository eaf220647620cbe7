-- Begin a batch of `total` lines, which are checked. Each job brings its even share of the shared budget, of which it
-- is granted its floor at once; `rest` are the tokens beyond these shares.
local batch, token, total, share, floor, rest, width = unpack(ARGV)
local key = batch_key(batch)
if not holds_batch(batch, token) then
  return 'lost'
elseif redis.call('HGET', key, 'stage') ~= 'validating' then
  return 'ok' -- a repetition, since the first response was lost
end
redis.call('HSET', key, 'stage', 'in_progress', 'at:in_progress', seconds(now_ms()), 'total', total)
if share ~= '' then
  redis.call('HSET', key, 'line_share', share, 'line_floor', floor, 'pool', rest, 'floors', 0, 'active', 0,
    'width', width)
end
return 'ok'
