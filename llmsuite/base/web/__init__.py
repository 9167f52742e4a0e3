"""HTTP: pages in a browser, with one theme, vendored libraries and a server for this machine only; and the client for
requests to other machines."""
