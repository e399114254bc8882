//! All endpoints, in one table: what they are called, what they need, what answers. The router is made of it, and the
//! API's description is compared with it.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::http::Method;
use axum::middleware::{from_fn_with_state, map_response};
use axum::routing::{MethodFilter, MethodRouter, on};

use super::{
    BODY_BYTES_MAX, Shared, alerts, audit, dead, events, health, integrity, openapi, overview, problem, session, stream,
};
use crate::access::{Guard, Need, guard, secure};

/// One endpoint.
pub struct Endpoint {
    /// Its method; the router has it in the handler.
    #[cfg_attr(not(test), allow(dead_code))]
    pub method: Method,
    /// Its path; what is in braces is filled in.
    pub path: &'static str,
    /// What it needs.
    pub need: Need,
    handler: MethodRouter<Arc<Shared>>,
}

fn endpoint<H, T>(method: Method, path: &'static str, need: Need, handler: H) -> Endpoint
where
    H: Handler<T, Arc<Shared>>,
    T: 'static,
{
    // The methods of the table are all known to the filter.
    let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::GET);
    Endpoint { method, path, need, handler: on(filter, handler) }
}

/// The table.
pub fn endpoints() -> Vec<Endpoint> {
    use Need::{Metrics, Nothing, Operator, Producer, Viewer};
    let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
    let mut login = endpoint(post.clone(), "/api/v1/session", Nothing, session::log_in);
    login.handler = login.handler.layer(DefaultBodyLimit::max(session::LOGIN_BYTES_MAX));
    let get = |path, need| (get.clone(), path, need);
    let post = |path, need| (post.clone(), path, need);
    let delete = |path, need| (delete.clone(), path, need);
    macro_rules! table {
        ($($verb:ident $path:literal $need:ident => $handler:expr,)*) => {
            vec![$({ let (method, path, need) = $verb($path, $need); endpoint(method, path, need, $handler) }),*]
        };
    }
    let mut table = table![
        get "/healthz" Nothing => health::healthz,
        get "/readyz" Nothing => health::readyz,
        get "/metrics" Metrics => health::metrics,
        get "/api/v1/openapi.json" Nothing => openapi::show,
        get "/api/v1/session" Nothing => session::show,
        delete "/api/v1/session" Viewer => session::log_out,
        post "/api/v1/events" Producer => events::post,
        get "/api/v1/events/stream" Viewer => stream::open,
        get "/api/v1/overview" Viewer => overview::show,
        get "/api/v1/outbox" Viewer => overview::outboxes,
        get "/api/v1/outbox/{name}/parked" Viewer => overview::parked,
        get "/api/v1/consumers" Viewer => overview::consumers,
        get "/api/v1/instances" Viewer => overview::instances,
        get "/api/v1/errors" Viewer => overview::errors,
        get "/api/v1/status" Viewer => overview::status,
        get "/api/v1/health" Viewer => health::show,
        get "/api/v1/alerts" Viewer => alerts::list,
        get "/api/v1/silences" Viewer => alerts::silences,
        post "/api/v1/silences" Operator => alerts::silence,
        delete "/api/v1/silences/{id}" Operator => alerts::unsilence,
        get "/api/v1/integrity" Viewer => integrity::list,
        post "/api/v1/integrity" Operator => integrity::check,
        get "/api/v1/integrity/{id}" Viewer => integrity::show,
        get "/api/v1/audit" Viewer => audit::list,
        get "/api/v1/dead-letters" Viewer => dead::list,
        get "/api/v1/dead-letters/stats" Viewer => dead::stats,
        post "/api/v1/dead-letters/discards" Operator => dead::discard,
        get "/api/v1/dead-letters/replays" Viewer => dead::replays::list,
        post "/api/v1/dead-letters/replays" Operator => dead::replays::start,
        get "/api/v1/dead-letters/replays/{id}" Viewer => dead::replays::show,
        delete "/api/v1/dead-letters/replays/{id}" Operator => dead::replays::cancel,
        get "/api/v1/dead-letters/{id}" Viewer => dead::show,
        get "/api/v1/dead-letters/{id}/payload" Operator => dead::payload,
    ];
    table.push(login);
    table
}

/// The router of the table. Every endpoint has its guard in front; whatever is answered has its headers.
pub fn router(shared: Arc<Shared>) -> Router {
    let mut router = Router::new();
    for Endpoint { path, need, handler, .. } in endpoints() {
        let guarding = Guard { access: shared.access.clone(), need };
        router = router.route(path, handler.route_layer(from_fn_with_state(guarding, guard)));
    }
    router
        .merge(crate::console::routes())
        .fallback(problem::not_found)
        .method_not_allowed_fallback(problem::method_not_allowed)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(map_response(secure))
        .with_state(shared)
}
