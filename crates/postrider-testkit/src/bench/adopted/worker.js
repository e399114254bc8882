// What services have instead of a relay: rows locked by a hundred, published with confirms, marked, committed.
const { Client } = require("pg");
const amqp = require("amqplib");

const [database, broker, exchange] = process.argv.slice(2);

async function main() {
  const db = new Client({ connectionString: database });
  await db.connect();
  const connection = await amqp.connect(broker);
  const channel = await connection.createConfirmChannel();
  console.log("ready");
  for (;;) {
    await db.query("BEGIN");
    const { rows } = await db.query(
      `SELECT id, routing_key, payload FROM outbox_events WHERE status = 'pending' AND available_at <= now()
       ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED`,
    );
    for (const row of rows) {
      channel.publish(exchange, row.routing_key, Buffer.from(JSON.stringify(row.payload)), {
        persistent: true,
        mandatory: true,
        messageId: `outbox-${row.id}`,
        contentType: "application/json",
      });
    }
    await channel.waitForConfirms();
    if (rows.length > 0) {
      await db.query(
        `UPDATE outbox_events SET status = 'published', attempts = attempts + 1, published_at = now(), updated_at = now()
         WHERE id = ANY($1)`,
        [rows.map((row) => row.id)],
      );
    }
    await db.query("COMMIT");
    if (rows.length === 0) await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
