"""The files of the chat page and the headers they are sent with."""

import httpx
from doubles_socket import in_loop, scripted_server


@in_loop
async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with scripted_server() as live, httpx.AsyncClient(base_url=live.http_url) as client:
        paths = [
            "/",
            *(f"/static/{name}" for name in ("chat.js", "conversation.js", "markdown.js", "chat.css", "icon.svg")),
        ]
        for path in paths:
            reply = await client.get(path)
            assert reply.status_code == 200, path
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            body = reply.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in body
            assert "https://" not in body
            assert " style=" not in body
            again = await client.get(path, headers={"if-none-match": reply.headers["etag"]})
            assert again.status_code == 304
        for path in ("/static/", "/static/../serve.py", "/static/%2e%2e/serve.py", "/static/index.js"):
            assert (await client.get(path)).status_code == 404, path
