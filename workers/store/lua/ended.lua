-- Return the ids of the jobs of one owner ('' for all) that ended between two times (ms), each with its time, oldest
-- first. Of those that ended at the lowest time, which are in the order of their ids, only those behind the id `behind`.
local owner, lowest, highest, behind, limit = unpack(ARGV)
local index = (owner == '' and JOBS or owned(owner)) .. ':ended'
local ends, start = {}, 0
while #ends < 2 * tonumber(limit) do
  local page = redis.call('ZRANGEBYSCORE', index, lowest, highest, 'WITHSCORES', 'LIMIT', start, limit)
  if #page == 0 then
    break
  end
  for i = 1, #page, 2 do
    if #ends < 2 * tonumber(limit) and (tonumber(page[i + 1]) > tonumber(lowest) or page[i] > behind) then
      ends[#ends + 1] = page[i]
      ends[#ends + 1] = page[i + 1]
    end
  end
  start = start + #page / 2
end
return ends
