-- The same orders in the same sequence each time; prints the result as one line.

local next_order = 0

function request()
   next_order = (next_order + 7) % 500
   return wrk.format("GET", wrk.path .. next_order)
end

function done(summary)
   local errors = summary.errors
   local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
   io.write(string.format("\nround %d %d\n", summary.requests, failed))
end
