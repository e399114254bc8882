//! The statements of a trigger, in both dialects.

use super::Trigger;
use crate::adopt::sql::Dialect;
use crate::adopt::{ColumnKind, TableInfo};

/// What names of ours begin with.
pub(crate) const PREFIX: &str = "postrider_";

/// The name of a trigger, and on PostgreSQL of its function.
pub(crate) fn name(entity: &str) -> String {
    format!("{PREFIX}{}", entity.to_lowercase())
}

/// PostgreSQL: a function of our schema, and the trigger that calls it. It runs with the rights of who made it, so that the
/// service's user needs none on our tables.
pub(crate) fn postgres(trigger: &Trigger, info: &TableInfo, id: &str) -> Vec<String> {
    let (column, literal) = (|name: &str| Dialect::Postgres.name(name), |text: &str| Dialect::Postgres.literal(text));
    let table = format!("{}.{}", column(&info.schema), column(&info.name));
    // Names are cut at 63 bytes, and two tables may look alike when their names are joined; the hash tells them apart.
    let whole = format!("{}\0{}\0{}", info.schema, info.name, trigger.entity.to_lowercase());
    let hash = crate::broker::topic::fnv64(whole.bytes());
    let function = format!("postrider.{}", column(&format!("on_{hash:016x}_{}", trigger.entity.to_lowercase())));
    let row = |row: &str, action: &str| {
        let field = |name: &str| format!("{row}.{}", column(name));
        let id = format!("{}::text", field(id));
        let mut payload = vec![
            format!("'entity', json_build_object('type', {}, 'id', {id})", literal(&trigger.entity)),
            format!("'action', {action}"),
        ];
        if let Some(version) = &trigger.version {
            payload.push(format!("'version', {}", field(version)));
        }
        if !trigger.columns.is_empty() {
            let copied: Vec<String> =
                trigger.columns.iter().map(|name| format!("{}, {}", literal(name), field(name))).collect();
            payload.push(format!("'columns', json_build_object({})", copied.join(", ")));
        }
        let key = format!("{} || ':' || {id}", literal(&trigger.entity));
        let tenant = trigger.tenant.as_ref().map_or("NULL".to_owned(), |tenant| format!("{}::text", field(tenant)));
        format!(
            "INSERT INTO postrider.outbox (topic, key, type, subject, tenant, payload) VALUES ({}, \
             CASE WHEN octet_length({key}) <= 255 THEN {key} ELSE md5({key}) END, {} || '.' || lower({action}), \
             left({id}, 250), {tenant}, json_build_object({}));",
            literal(&trigger.topic),
            literal(&trigger.entity.to_lowercase()),
            payload.join(", "),
        )
    };
    let trigger_name = column(&name(&trigger.entity));
    vec![
        format!(
            "CREATE OR REPLACE FUNCTION {function}() RETURNS trigger\n\
             LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $postrider$\n\
             BEGIN\n    \
                 IF TG_OP = 'DELETE' THEN\n        {}\n    \
                 ELSIF TG_OP = 'INSERT' THEN\n        {}\n    \
                 ELSIF OLD.{id}::text IS DISTINCT FROM NEW.{id}::text THEN\n        \
                     -- Another id is another entity.\n        {}\n        {}\n    \
                 ELSIF NOT (OLD OPERATOR(pg_catalog.*=) NEW) THEN\n        {}\n    \
                 END IF;\n    \
                 RETURN NULL;\n\
             END $postrider$",
            row("OLD", "'DELETE'"),
            row("NEW", "'INSERT'"),
            row("OLD", "'DELETE'"),
            row("NEW", "'INSERT'"),
            row("NEW", "'UPDATE'"),
            id = column(id),
        ),
        format!("DROP TRIGGER IF EXISTS {trigger_name} ON {table}"),
        format!(
            "CREATE TRIGGER {trigger_name} AFTER INSERT OR UPDATE OR DELETE ON {table}\n\
             FOR EACH ROW EXECUTE FUNCTION {function}()"
        ),
    ]
}

/// The name of one of MySQL's triggers.
#[allow(dead_code)] // unused without the feature
pub(crate) fn mysql_name(entity: &str, table: &str, action: &str) -> String {
    format!("{}_{table}_{action}", name(entity))
}

/// MySQL and MariaDB: one trigger for each action.
#[allow(dead_code)] // unused without the feature
pub(crate) fn mysql(trigger: &Trigger, info: &TableInfo, id: &str, database: &str) -> Vec<String> {
    let (column, literal) = (|name: &str| Dialect::Mysql.name(name), |text: &str| Dialect::Mysql.literal(text));
    let table = format!("{}.{}", column(&info.schema), column(&info.name));
    let row = |row: &str, action: &str| {
        let field = |name: &str| format!("{row}.{}", column(name));
        let id = format!("CAST({} AS CHAR)", field(id));
        let mut payload = vec![
            format!("'entity', json_object('type', {}, 'id', {id})", literal(&trigger.entity)),
            format!("'action', '{action}'"),
        ];
        if let Some(version) = &trigger.version {
            payload.push(format!("'version', {}", field(version)));
        }
        if !trigger.columns.is_empty() {
            let copied: Vec<String> =
                trigger.columns.iter().map(|name| format!("{}, {}", literal(name), field(name))).collect();
            payload.push(format!("'columns', json_object({})", copied.join(", ")));
        }
        let key = format!("concat({}, ':', {id})", literal(&trigger.entity));
        let tenant =
            trigger.tenant.as_ref().map_or("NULL".to_owned(), |tenant| format!("CAST({} AS CHAR)", field(tenant)));
        format!(
            "INSERT INTO {}.postrider_outbox (topic, `key`, type, subject, tenant, payload) VALUES ({}, \
             IF(octet_length({key}) <= 255, {key}, md5({key})), {}, left({id}, 250), {tenant}, json_object({}));",
            column(database),
            literal(&trigger.topic),
            literal(&format!("{}.{}", trigger.entity.to_lowercase(), action.to_lowercase())),
            payload.join(", "),
        )
    };
    let mut statements = Vec::new();
    for action in ["insert", "update", "delete"] {
        let name = column(&mysql_name(&trigger.entity, &info.name, action));
        let body = match action {
            "insert" => row("NEW", "INSERT"),
            "delete" => row("OLD", "DELETE"),
            _ => {
                // Byte by byte: a collation calls other letters equal.
                let is_same = |name: &str| {
                    let kinds = [ColumnKind::Text, ColumnKind::Json, ColumnKind::Uuid];
                    let is_text = info.column(name).is_some_and(|each| kinds.contains(&each.kind));
                    let name = column(name);
                    match is_text {
                        true => format!("CAST(OLD.{name} AS BINARY) <=> CAST(NEW.{name} AS BINARY)"),
                        false => format!("OLD.{name} <=> NEW.{name}"),
                    }
                };
                let same: Vec<String> = info.columns.iter().map(|each| is_same(&each.name)).collect();
                format!(
                    "IF NOT ({}) THEN {} {} ELSEIF NOT ({}) THEN {} END IF;",
                    is_same(id),
                    row("OLD", "DELETE"),
                    row("NEW", "INSERT"),
                    same.join(" AND "),
                    row("NEW", "UPDATE"),
                )
            }
        };
        let schema = column(&info.schema);
        statements.push(format!("DROP TRIGGER IF EXISTS {schema}.{name}"));
        statements.push(format!(
            "CREATE TRIGGER {schema}.{name} AFTER {} ON {table} FOR EACH ROW BEGIN {body} END",
            action.to_uppercase()
        ));
    }
    statements
}
