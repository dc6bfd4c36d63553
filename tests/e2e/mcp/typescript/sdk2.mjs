// The client of the SDK's second major version.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

import { drive, target, watchedFetch } from "./driver.mjs";

const client = new Client({ name: "test", version: "1" }, { versionNegotiation: { mode: target.mode } });
const transport = new StreamableHTTPClientTransport(new URL(target.url), {
  requestInit: { headers: target.headers },
  fetch: watchedFetch,
});
await drive(client, transport, {
  callTool: (params, options) => client.callTool(params, options),
  version: () => client.getNegotiatedProtocolVersion(),
});
