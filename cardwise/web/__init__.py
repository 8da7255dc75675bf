"""`cardwise web`: a page in the browser that shows what the command line shows, and stays up to date.

Input: the cluster, read with the rights of the person who started the command. Output: HTML on a loopback address. The
page changes nothing: every route is a GET, and no request other than a read goes to the API server.

    command    the command and its options
    server     listens on 127.0.0.1, and lets in only requests with the token of the address
    app        routes, response headers, and the stream of updates
    pages      what each page shows, as plain values: bars, rows, time lines
    whereto    where a pod that does not exist would go
    snapshot   reads the cluster, at most once every few seconds for all open pages

How a page stays up to date. A page is a few *parts*, each an element with an id: one for each node, or one for the
whole table. The browser opens `/events` with the page's name and filters. Every two seconds the server renders the
parts from a new snapshot, and sends those whose HTML has changed; `static/page.js` morphs them into the page, so focus
and open details stay. Example: 1,000 nodes, a pod starts on one: one part of about 2 KB is sent. If parts were added or
removed, the server sends `reload`, and the browser fetches the page again and morphs all of it.

Sentences and tables are those of the command line (`cardwise.cli`). Texts from the cluster are escaped by Jinja, after
`console.clean_line` has made control characters visible. docs/design/0040-web.md has the reasons.
"""
