// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream serve device`, whose server is in the Python package.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use serde_json::{Value, json};
use ts_remote::Address;

use super::arguments::{at_least_one, budget};
use super::serve::{AccessArguments, address, host_and_port};
use crate::Error;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The address to listen on: HOST:PORT, with port 0 for a free port, or unix:PATH.
    #[arg(
        long, env = "TENSORSTREAM_LISTEN", default_value = "127.0.0.1:7470", value_parser = address
    )]
    listen: Address,
    #[command(flatten)]
    access: AccessArguments,
    /// What runs the operators: the CPU, NVIDIA GPUs, or the accelerator of PyTorch.
    #[arg(
        long, env = "TENSORSTREAM_DEVICE", default_value = "cpu",
        value_parser = ["cpu", "cuda", "accelerator"],
    )]
    device: String,
    /// The number of devices. By default all GPUs, or 8 devices that share the CPU.
    #[arg(long, env = "TENSORSTREAM_DEVICES", value_parser = at_least_one)]
    devices: Option<usize>,
    /// The number of PyTorch threads of each session.
    #[arg(long, env = "TENSORSTREAM_THREADS", value_parser = at_least_one)]
    threads: Option<usize>,
    /// The most sessions at a time.
    #[arg(
        long, env = "TENSORSTREAM_MAX_SESSIONS", default_value_t = 256, value_parser = at_least_one
    )]
    max_sessions: usize,
    /// The most sessions of one client at a time. Clients are distinguished by their addresses.
    #[arg(
        long, env = "TENSORSTREAM_CLIENT_SESSIONS", default_value_t = 64,
        value_parser = at_least_one
    )]
    client_sessions: usize,
    /// End sessions whose client sends nothing for this many seconds. Never by default.
    #[arg(long, env = "TENSORSTREAM_IDLE_TIMEOUT", value_parser = at_least_one)]
    idle_timeout: Option<usize>,
    /// The most memory of one session, such as 4GiB. Unlimited by default.
    #[arg(long, env = "TENSORSTREAM_SESSION_MEMORY", value_parser = budget)]
    session_memory: Option<usize>,
    /// Checkpoints that clients can load through this server: a directory, hf:// with the beginning
    /// of the names of models, the beginning of URLs such as s3://BUCKET, or any for all files and
    /// models. Can be given several times, or separated by commas.
    #[arg(long, env = "TENSORSTREAM_WEIGHTS", value_delimiter = ',')]
    weights: Vec<String>,
    /// The most memory of one session for weights that it loads from here. Those that do not fit
    /// are streamed. Unlimited by default.
    #[arg(long, env = "TENSORSTREAM_BUDGET", value_parser = budget)]
    budget: Option<usize>,
    /// Python functions that clients can call: the name of a module of this computer, or any for
    /// all, also those that clients send. Can be given several times, or separated by commas.
    #[arg(long, env = "TENSORSTREAM_ALLOW_FUNCTIONS", value_delimiter = ',')]
    allow_functions: Vec<String>,
    /// A server with the same token, with which tensors can be copied directly. Can be given
    /// several times, or separated by commas.
    #[arg(long, env = "TENSORSTREAM_PEER", value_delimiter = ',')]
    peer: Vec<String>,
    /// The address of a listener to which clients can send tensors of this machine, or any for all.
    /// Can be given several times, or separated by commas.
    #[arg(long, env = "TENSORSTREAM_SEND_TO", value_delimiter = ',')]
    send_to: Vec<String>,
    /// Certificates (PEM) to trust for --peer and --send-to.
    #[arg(long, env = "TENSORSTREAM_PEER_CA")]
    peer_ca: Option<PathBuf>,
    /// HOST:PORT at which /metrics, in the text format of Prometheus, and /healthz are served.
    #[arg(long, env = "TENSORSTREAM_METRICS", value_parser = host_and_port)]
    metrics: Option<String>,
    /// Seconds for which sessions may go on after Ctrl-C or SIGTERM, while new ones are refused. A
    /// second signal ends them within seconds.
    #[arg(long, env = "TENSORSTREAM_DRAIN", default_value_t = 0)]
    drain: u32,
    /// How log lines are written to standard error.
    #[arg(
        long,
        env = "TENSORSTREAM_LOG_FORMAT",
        default_value = "text",
        value_parser = ["text", "json"],
    )]
    log_format: String,
    /// End with the first session, or after 60 seconds without one.
    #[arg(long)]
    once: bool,
    /// Do not restrict the processes of sessions.
    #[arg(long, env = "TENSORSTREAM_NO_SANDBOX", value_parser = FalseyValueParser::new())]
    no_sandbox: bool,
}

impl Arguments {
    /// Returns the options as a JSON object. Reads the token.
    pub(super) fn options(&self) -> Result<Value, Error> {
        let AccessArguments { tls_cert, tls_key, tls_client_ca, insecure, .. } = &self.access;
        Ok(json!({
            "listen": self.listen.to_string(),
            "token": self.access.token()?,
            "cert": tls_cert,
            "key": tls_key,
            "ca": tls_client_ca,
            "insecure": insecure,
            "device": self.device,
            "devices": self.devices,
            "threads": self.threads,
            "max_sessions": self.max_sessions,
            "client_sessions": self.client_sessions,
            "idle_timeout": self.idle_timeout,
            "session_memory": self.session_memory,
            "weights": self.weights,
            "budget": self.budget,
            "functions": self.allow_functions,
            "peers": self.peer,
            "send_to": self.send_to,
            "peer_ca": self.peer_ca,
            "metrics": self.metrics,
            "drain": self.drain,
            "log_format": self.log_format,
            "once": self.once,
            "sandbox": !self.no_sandbox,
        }))
    }
}
