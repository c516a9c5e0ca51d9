// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream serve-weights`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use ts_remote::{Address, ConnectionOptions, Identity, ServerOptions, TlsServer};

use super::MIB;
use super::console::{Console, say};
use crate::{Error, FetchOptions, ServeOptions, fetch, serve_weights};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The directory.
    directory: PathBuf,
    /// The address: HOST:PORT, with port 0 for a free port, or unix:PATH.
    #[arg(long, default_value = "127.0.0.1:7471", value_parser = address)]
    listen: Address,
    /// Also serve targets of symbolic links outside of the directory. A Hugging Face cache needs
    /// it.
    #[arg(long)]
    follow_symlinks: bool,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, clap::Args)]
pub(super) struct FetchArguments {
    /// A file or directory, ts://HOST:PORT/NAME, or all files without a name. Token and
    /// certificates come from the environment: TENSORSTREAM_TOKEN, TENSORSTREAM_CA,
    /// TENSORSTREAM_CERT, TENSORSTREAM_KEY.
    url: String,
    /// The target directory.
    directory: PathBuf,
    /// Serve the files to others that fetch them, at this address, which they must reach. Runs
    /// until it is interrupted.
    #[arg(long, value_parser = address)]
    listen: Option<Address>,
    #[command(flatten)]
    how: How,
}

/// How files are served.
#[derive(Debug, clap::Args)]
struct How {
    /// A file whose first line is the secret of the clients. They pass it as TENSORSTREAM_TOKEN.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// A certificate chain (PEM). Clients then connect with TLS, to tss://HOST:PORT/NAME.
    #[arg(long, requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM).
    #[arg(long, requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Accept only clients with a certificate of these authorities (PEM).
    #[arg(long, requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Memory for data that is read and not yet sent, such as 256MiB.
    #[arg(long, default_value = "256MiB", value_parser = super::budget)]
    memory: usize,
    /// Accept clients without a token or certificate on a public address.
    #[arg(long)]
    insecure: bool,
    /// Seconds to wait for transfers after Ctrl-C or SIGTERM. A second signal ends them.
    #[arg(long, default_value_t = 10)]
    grace: u64,
}

fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|error: ts_remote::Error| error.to_string())
}

impl How {
    fn options(&self) -> Result<ServeOptions, Error> {
        let token = self.token_file.as_deref().map(token).transpose()?;
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificates), Some(key)) => {
                Some(TlsServer::new(Identity { certificates, key }, self.tls_client_ca.as_deref())?)
            }
            _ => None,
        };
        let usual = ServerOptions::default();
        let connection = ConnectionOptions { token, ..usual.connection.clone() };
        let grace_period = Duration::from_secs(self.grace);
        let server = ServerOptions { connection, tls, grace_period, ..usual };
        Ok(ServeOptions {
            server,
            memory_bytes: self.memory,
            insecure: self.insecure,
            ..ServeOptions::default()
        })
    }
}

/// The secret in a file: its first line.
fn token(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path).map_err(|e| crate::checkpoint::open_error(path, e))?;
    match text.lines().next().map(str::trim).filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.into()),
        None => {
            let reason = format!("{}: no token: its first line is empty", path.display());
            Err(ts_remote::Error::Misuse(reason).into())
        }
    }
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let follow_symlinks = arguments.follow_symlinks;
    let options = ServeOptions { follow_symlinks, ..arguments.how.options()? };
    let scheme = if options.server.tls.is_some() { "tss" } else { "ts" };
    let began = |address: &Address| match console.json {
        true => {
            say(json!({ "address": address.to_string(), "url": format!("{scheme}://{address}/") }));
        }
        false => say(format_args!("{} as {scheme}://{address}/", arguments.directory.display())),
    };
    let log = |peer: &str, error: &ts_remote::Error| match error {
        ts_remote::Error::Closed { .. } => console.detail(format_args!("{peer}: {error}")),
        error => console.note(format_args!("{peer}: {error}")),
    };
    let stats = serve_weights(
        &arguments.directory,
        &arguments.listen,
        &options,
        &mut || interrupt(),
        began,
        log,
    )?;
    let sent = stats.sent_bytes as f64 / MIB;
    match console.json {
        true => say(json!({
            "accepted": stats.accepted, "failed_handshakes": stats.failed_handshakes, "failed": stats.failed,
            "sent_bytes": stats.sent_bytes, "received_bytes": stats.received_bytes,
        })),
        false => say(format_args!("{} connections, {sent:.1} MiB sent", stats.accepted)),
    }
    Ok(0)
}

pub(super) fn fetched(
    arguments: &FetchArguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let how = arguments.how.options()?;
    let options = FetchOptions { serve: arguments.listen.clone().map(|address| (address, how)) };
    let bar = console.bar("fetch");
    let begin = Instant::now();
    let done = fetch(&arguments.url, &arguments.directory, &options, &mut |progress| {
        bar.show(progress);
        interrupt()
    })?;
    drop(bar);
    let (seconds, from) = (begin.elapsed().as_secs_f64(), done.from.as_deref());
    match console.json {
        true => say(json!({
            "files": done.files, "bytes": done.bytes, "seconds": seconds, "from": from,
            "address": done.address().map(ToString::to_string),
        })),
        false => say(format_args!(
            "{} files, {:.1} MiB in {seconds:.1} s{}",
            done.files,
            done.bytes as f64 / MIB,
            from.map(|from| format!(", by way of {from}")).unwrap_or_default()
        )),
    }
    while done.address().is_some() && !interrupt() {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(0)
}
