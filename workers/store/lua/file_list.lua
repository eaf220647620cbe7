-- Return the files of one owner ('' for all) and one purpose ('' for all) behind the file `after`, newest first or
-- oldest first.
local owner, purpose, after, limit, order = unpack(ARGV)
local index = FILES
if owner ~= '' then
  index = index .. ':of:' .. owner
end
if purpose ~= '' then
  index = index .. ':for:' .. purpose
end
local n
if after ~= '' then
  n = redis.call('HGET', file_key(after), 'n')
  if not n or (owner ~= '' and redis.call('HGET', file_key(after), 'owner') ~= owner) then
    return false
  end
end
local ids
if order == 'asc' then
  ids = redis.call('ZRANGEBYSCORE', index, n and '(' .. n or '-inf', '+inf', 'LIMIT', 0, limit)
else
  ids = redis.call('ZREVRANGEBYSCORE', index, n and '(' .. n or '+inf', '-inf', 'LIMIT', 0, limit)
end
local files = {}
for _, id in ipairs(ids) do
  files[#files + 1] = redis.call('HGETALL', file_key(id))
end
return files
