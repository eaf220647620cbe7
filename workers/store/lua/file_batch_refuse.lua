-- Record lines that cannot become jobs: pairs of a line's index and the reason (JSON).
local batch, token = unpack(ARGV)
if not holds_batch(batch, token) then
  return 'lost'
end
for i = 3, #ARGV, 2 do
  redis.call('HSET', batch_key(batch) .. ':refused', ARGV[i], ARGV[i + 1])
end
return 'ok'
