"""A small page to try prompts. Text is shown as text, never as markup. The script is a separate
file, so that the page needs no inline code.
"""

HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>megatron-lightning</title>
<link rel="stylesheet" href="page.css"></head>
<body><h1>megatron-lightning</h1>
<form id="form"><textarea id="prompt" rows="8" placeholder="Prompt"></textarea>
<p><label>new tokens <input id="max" type="number" value="64" min="1"></label>
<label>temperature <input id="temperature" type="number" value="0.8" min="0" step="0.1"></label>
<label><input id="chat" type="checkbox"> chat</label>
<label>key <input id="key" type="password" autocomplete="off"></label>
<button>Write</button></p></form><pre id="text"></pre>
<script src="page.js"></script></body></html>
"""

CSS = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto }
textarea { width: 100%; font: inherit } input[type=number] { width: 5rem }
label { margin-right: 1rem } pre { white-space: pre-wrap; overflow-wrap: anywhere }
"""

JAVASCRIPT = """const $ = (id) => document.getElementById(id);
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const chat = $("chat").checked, out = $("text");
  const body = {max_tokens: Number($("max").value), stream: true};
  body.temperature = Number($("temperature").value);
  if (chat) body.messages = [{role: "user", content: $("prompt").value}];
  else body.prompt = $("prompt").value;
  const headers = {"Content-Type": "application/json"};
  if ($("key").value) headers.Authorization = "Bearer " + $("key").value;
  out.textContent = chat ? "" : $("prompt").value;
  const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions",
                             {method: "POST", headers, body: JSON.stringify(body)});
  if (!answer.ok) { out.textContent = (await answer.json()).error.message; return; }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\\n\\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const piece = JSON.parse(line.slice(6));
      if (piece.error) { out.textContent += "\\n" + piece.error.message; return; }
      const choice = piece.choices[0];
      out.textContent += chat ? (choice.delta.content || "") : choice.text;
    }
  }
});
"""
