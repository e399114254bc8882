"""Gets orders over HTTP, writes invoices and tells of them in the same transaction. No SDK."""
import json, os, sqlite3
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service(BaseHTTPRequestHandler):
    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        database = sqlite3.connect("postrider.db", timeout=30, isolation_level="IMMEDIATE")
        database.execute("CREATE TABLE IF NOT EXISTS invoice (event TEXT PRIMARY KEY, number TEXT, total INTEGER)")
        with database:  # One transaction. The same event may come twice; its id is the invoice's key.
            new = database.execute("INSERT OR IGNORE INTO invoice VALUES (?, ?, ?)",
                                   (self.headers["idempotency-key"], order["order"], order["total"]))
            if new.rowcount == 1:
                database.execute("INSERT INTO outbox (topic, key, type, payload) VALUES (?, ?, ?, ?)",
                                 ("invoices.created", order["order"], "invoice.created", json.dumps(order)))
        database.close()
        self.send_response(204)  # Only now: 2xx is the ack.
        self.end_headers()


ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3000"))), Service).serve_forever()
