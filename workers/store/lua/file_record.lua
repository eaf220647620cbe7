-- Record a file whose bytes are stored, unless its owner's files would have more than `cap` bytes together ('' for no
-- cap).
local id, owner, filename, purpose, bytes, keep, cap = unpack(ARGV)
local total = number(redis.call('HGET', FILES .. ':bytes', owner))
if cap ~= '' and total + bytes > tonumber(cap) then
  return { 'full', ms(total) }
end
record_file(id, owner, filename, purpose, bytes, keep)
return { 'ok' }
