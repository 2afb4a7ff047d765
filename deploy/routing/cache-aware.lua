-- A policy for haproxy.cfg: a prompt goes to the engine that has the longest beginning of it, in any
-- tier. Where that is less than half of the prompt, it names no engine, and HAProxy goes on as without it.
local lookup = os.getenv("ROUTER_LOOKUP") .. "/v1/lookup"
local secret = assert(io.open(assert(os.getenv("KVTIER_ADMIN_TOKEN_FILE"))))
local headers = {["content-type"] = {"application/json"}, ["authorization"] = {"Bearer " .. secret:read("l")}}
secret:close()

local function ask(url, body, with)
    local answer = core.httpclient():post{url = url, body = body, headers = with, timeout = 300}
    return answer and answer.status == 200 and answer.body or ""
end

local function tokens_of(body)                          -- as they are, or by an engine that is up
    local given = body:match('"prompt"%s*:%s*(%[[%d%s,]*%])')
    for _, server in pairs(given and {} or core.backends.engines.servers) do
        if server:get_stats().status:match("^UP") then
            local url = "http://" .. server:get_addr() .. "/tokenize"
            return ask(url, body, {["content-type"] = headers["content-type"]}):match('"tokens"%s*:%s*(%[[%d%s,]*%])')
        end
    end
    return given
end

core.register_action("pick_engine", {"http-req"}, function(txn)
    local body = txn.sf:req_body() or ""
    local tokens, salt = tokens_of(body), body:match('"cache_salt"%s*:%s*("[^"\\]+")')
    local most = tokens and select(2, tokens:gsub("%d+", "")) / 2 or 0
    local found = tokens and ask(lookup, '{"tokens":' .. tokens .. ',"salt":' .. (salt or "null") .. "}", headers) or ""
    for engine, held in found:gmatch('"engine":"([^"]+)","tokens":(%d+)') do
        if tonumber(held) >= most and tonumber(held) > 0 then
            txn:set_var("txn.engine", engine)
            most = held + 1
        end
    end
end)
