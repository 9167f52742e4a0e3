"""HTTP: pages in a browser, with one theme, libraries that come with the package and a server for this machine only;
and the client that asks other machines."""
