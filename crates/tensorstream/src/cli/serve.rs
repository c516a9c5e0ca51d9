// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream serve files` and `tensorstream fetch`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::builder::FalseyValueParser;
use parking_lot::Mutex;
use serde_json::json;
use ts_remote::{Address, Identity, ServerOptions, ServerStats, TlsServer};

use super::arguments::budget;
use super::console::{Console, MIB, say};
use super::status::{Status, StatusServer};
use crate::{Error, FetchOptions, ServeOptions, serve_weights};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The directory that contains the files.
    directory: PathBuf,
    /// The address to listen on: HOST:PORT, with port 0 for a free port, or unix:PATH.
    #[arg(
        long, env = "TENSORSTREAM_LISTEN", default_value = "127.0.0.1:7471", value_parser = address
    )]
    listen: Address,
    /// Follow symbolic links to targets outside of the directory. A Hugging Face cache requires
    /// this option.
    #[arg(long, env = "TENSORSTREAM_FOLLOW_SYMLINKS", value_parser = FalseyValueParser::new())]
    follow_symlinks: bool,
    /// HOST:PORT at which /metrics, in the text format of Prometheus, and /healthz are served.
    #[arg(long, env = "TENSORSTREAM_METRICS", value_parser = host_and_port)]
    metrics: Option<String>,
    #[command(flatten)]
    server: ServerArguments,
}

#[derive(Debug, clap::Args)]
pub(super) struct FetchArguments {
    /// The URL of a file or directory: ts://HOST:PORT/NAME. Without NAME, all files are fetched.
    /// The token and the certificates are read from the environment variables TENSORSTREAM_TOKEN,
    /// TENSORSTREAM_CA, TENSORSTREAM_CERT and TENSORSTREAM_KEY.
    url: String,
    /// The target directory.
    directory: PathBuf,
    /// Serve the files at this address to other machines that fetch them. Those machines must be
    /// able to reach the address. The command then runs until it is interrupted. The options
    /// --token-file, --tls-*, --memory, --insecure and --drain configure this server, and have no
    /// effect without --listen.
    #[arg(long, value_parser = address)]
    listen: Option<Address>,
    #[command(flatten)]
    server: ServerArguments,
}

/// Who may connect to a server.
#[derive(Debug, clap::Args)]
pub(super) struct AccessArguments {
    /// A file whose first line is the token, the secret of the clients.
    #[arg(long, env = "TENSORSTREAM_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// A certificate chain (PEM). Clients then use TLS.
    #[arg(long, env = "TENSORSTREAM_TLS_CERT", requires = "tls_key")]
    pub(super) tls_cert: Option<PathBuf>,
    /// The private key of the certificate (PEM).
    #[arg(long, env = "TENSORSTREAM_TLS_KEY", requires = "tls_cert")]
    pub(super) tls_key: Option<PathBuf>,
    /// Accept only clients with a certificate that one of these authorities signed (PEM).
    #[arg(long, env = "TENSORSTREAM_TLS_CLIENT_CA", requires = "tls_cert")]
    pub(super) tls_client_ca: Option<PathBuf>,
    /// Accept clients from other machines without a token or certificate.
    #[arg(long, env = "TENSORSTREAM_INSECURE", value_parser = FalseyValueParser::new())]
    pub(super) insecure: bool,
}

impl AccessArguments {
    /// Reads the token, if there is a file with one.
    pub(super) fn token(&self) -> Result<Option<String>, Error> {
        self.token_file.as_deref().map(read_token).transpose()
    }
}

/// Options of the server of files.
#[derive(Debug, clap::Args)]
struct ServerArguments {
    #[command(flatten)]
    access: AccessArguments,
    /// Memory for data that is read and not yet sent, such as 256MiB.
    #[arg(long, env = "TENSORSTREAM_MEMORY", default_value = "256MiB", value_parser = budget)]
    memory: usize,
    /// Seconds to wait for transfers after Ctrl-C or SIGTERM. A second signal ends the command at
    /// once.
    #[arg(long, alias = "grace", env = "TENSORSTREAM_DRAIN", default_value_t = 10)]
    drain: u64,
}

/// Checks that a text has the form HOST:PORT.
pub(super) fn host_and_port(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.into()),
        _ => Err("expected HOST:PORT".into()),
    }
}

pub(super) fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|error: ts_remote::Error| error.to_string())
}

impl ServerArguments {
    fn options(&self) -> Result<ServeOptions, Error> {
        let AccessArguments { tls_cert, tls_key, tls_client_ca, insecure, .. } = &self.access;
        let token = self.access.token()?;
        let tls = match (tls_cert, tls_key) {
            (Some(certificates), Some(key)) => {
                Some(TlsServer::new(Identity { certificates, key }, tls_client_ca.as_deref())?)
            }
            _ => None,
        };
        let defaults = ServerOptions::default();
        let connection = defaults.connection.clone().with_token(token);
        let grace_period = Duration::from_secs(self.drain);
        let server =
            defaults.with_connection(connection).with_tls(tls).with_grace_period(grace_period);
        Ok(ServeOptions::default()
            .with_server(server)
            .with_memory_bytes(self.memory)
            .with_insecure(*insecure))
    }
}

/// Returns the token in a file: its first line, without surrounding white space.
fn read_token(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::open(path, e))?;
    let refused = |reason: &str| {
        let reason = format!("{}: cannot read the token: {reason}", path.display());
        Err(ts_remote::Error::Misuse(reason).into())
    };
    // Clients would not send what an editor has added invisibly.
    let is_invisible = |letter: char| letter.is_control() || letter == '\u{feff}';
    match text.lines().next().map(str::trim) {
        None | Some("") => refused("the first line is empty"),
        Some(line) if line.contains(is_invisible) => refused(
            "the first line has control characters or a byte-order mark; save the file as plain \
             text",
        ),
        Some(line) => Ok(line.into()),
    }
}

/// The state of the server, for monitors.
#[derive(Debug, Default)]
struct State {
    stats: ServerStats,
    /// Whether the server has begun to accept connections.
    started: bool,
    /// Whether no more connections are accepted.
    stops: bool,
}

impl State {
    fn status(&self) -> Status {
        let stats = &self.stats;
        let metrics = [
            ("connections_total", "counter", "Accepted connections.", stats.accepted),
            (
                "failed_handshakes_total",
                "counter",
                "Connections whose handshake took too long, or that were too many.",
                stats.failed_handshakes,
            ),
            (
                "failed_connections_total",
                "counter",
                "Connections that ended with an error, such as a wrong token.",
                stats.failed,
            ),
            ("sent_bytes_total", "counter", "Bytes written to clients.", stats.sent_bytes),
            ("received_bytes_total", "counter", "Bytes read from clients.", stats.received_bytes),
            ("connections", "gauge", "Open connections.", stats.open as u64),
            (
                "stopping",
                "gauge",
                "Whether no more connections are accepted because the server stops.",
                u64::from(self.stops),
            ),
        ];
        let text = |(name, kind, help, value)| {
            let name = format!("tensorstream_serve_files_{name}");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n")
        };
        let refuses = match (self.started, self.stops) {
            (false, _) => Some("the server is starting"),
            (true, true) => Some("the server is stopping"),
            (true, false) => None,
        };
        Status { metrics: metrics.into_iter().map(text).collect(), refuses }
    }
}

pub(super) fn serve(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let options = arguments.server.options()?.with_follow_symlinks(arguments.follow_symlinks);
    let scheme = if options.server.tls.is_some() { "tss" } else { "ts" };
    let log = |peer: &str, error: &ts_remote::Error| match error.is_end() {
        true => console.detail(format_args!("{peer}: {error}")),
        false => console.note(format_args!("{peer}: {error}")),
    };
    let state = Arc::new(Mutex::new(State::default()));
    let on_listening = |address: &Address| {
        state.lock().started = true;
        let url = format!("{scheme}://{address}/");
        match console.json {
            true => say(json!({ "address": address.to_string(), "url": url })),
            false => say(format_args!("serving {} at {url}", arguments.directory.display())),
        }
    };
    let shared = Arc::clone(&state);
    let pages = arguments.metrics.as_deref();
    let pages = pages.map(|at| StatusServer::start(at, move || shared.lock().status()));
    let _pages = pages.transpose()?;
    let mut stop = |stats: &ServerStats| {
        let mut state = state.lock();
        state.stats = *stats;
        state.stops |= interrupt();
        state.stops
    };
    let stats = serve_weights(
        &arguments.directory,
        &arguments.listen,
        &options,
        &mut stop,
        on_listening,
        log,
    )?;
    let sent = stats.sent_bytes as f64 / MIB;
    match console.json {
        true => say(json!({
            "accepted": stats.accepted,
            "failed_handshakes": stats.failed_handshakes,
            "failed": stats.failed,
            "sent_bytes": stats.sent_bytes,
            "received_bytes": stats.received_bytes,
        })),
        false => say(format_args!("{} connections, {sent:.1} MiB sent", stats.accepted)),
    }
    Ok(0)
}

pub(super) fn fetch(
    arguments: &FetchArguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let server = arguments.server.options()?;
    let options = match &arguments.listen {
        Some(address) => FetchOptions::default().with_serve(address.clone(), server),
        None => FetchOptions::default(),
    };
    let bar = console.bar("fetch");
    let began = Instant::now();
    let done = crate::fetch(&arguments.url, &arguments.directory, &options, &mut |progress| {
        bar.show(progress);
        interrupt()
    })?;
    drop(bar);
    let (seconds, from) = (began.elapsed().as_secs_f64(), done.from.as_deref());
    match console.json {
        true => say(json!({
            "files": done.files, "bytes": done.bytes, "seconds": seconds, "from": from,
            "address": done.address().map(ToString::to_string),
        })),
        false => say(format_args!(
            "{} files, {:.1} MiB in {seconds:.1} s{}",
            done.files,
            done.bytes as f64 / MIB,
            from.map(|from| format!(", via {from}")).unwrap_or_default()
        )),
    }
    while done.address().is_some() && !interrupt() {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(0)
}
