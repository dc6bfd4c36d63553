// The client of the SDK's first major version, which command-line agents ship.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

import { drive, target, watchedFetch } from "./driver.mjs";

const client = new Client({ name: "test", version: "1" });
const transport = new StreamableHTTPClientTransport(new URL(target.url), {
  requestInit: { headers: target.headers },
  fetch: watchedFetch,
});
await drive(client, transport, {
  callTool: (params, options) => client.callTool(params, undefined, options),
  version: () => transport.protocolVersion,
});
