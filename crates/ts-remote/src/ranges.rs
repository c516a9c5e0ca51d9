// SPDX-License-Identifier: MIT OR Apache-2.0
//! The service `ranges`, which reads ranges of remote files such as checkpoints.

use bytes::Bytes;
use ts_format::Dtype;

use crate::fields::{FieldReader, FieldWriter};
use crate::{
    Connection, ConnectionOptions, Error, Event, Handler, Link, Role, SendOptions, Sink, Socket,
    TensorInfo,
};

/// The name of the service that a [`RangeHandler`] offers.
pub const RANGES: &str = "ranges";
/// The longest range of one request, in bytes.
pub const MAX_RANGE: u64 = 16 << 20;

/// The maximum number of files that a client accepts in a listing.
const MAX_LISTED: usize = 1 << 16;

const OPEN: u64 = 1;
const READ: u64 = 2;
const LIST: u64 = 3;
const JOIN: u64 = 4;

const OPERATION: u8 = 0x81;
const NAME: u8 = 0x82;
const FILE: u8 = 0x83;
const OFFSET: u8 = 0x84;
const LEN: u8 = 0x85;
const VERSION: u8 = 0x86;
const REFUSED: u8 = 0x87;
const REASON: u8 = 0x88;
const ENTRY: u8 = 0x89;
const ADDRESS: u8 = 0x8a;
/// For list: the last name of the previous answer. For join: the address of a lost peer.
const AFTER_OR_LOST: u8 = 0x8b;

/// The maximum length of the entries in one answer to list, in bytes. The client requests the
/// remaining entries.
const PAGE_LEN: usize = 32 << 10;

/// A file of a server, in the state in which the server opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// The server's number for the file on this connection.
    pub id: u64,
    /// The length in bytes.
    pub len: u64,
    /// Bytes that identify the state of the file. They differ after the file has changed.
    pub version: Vec<u8>,
}

/// A server's refusal of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// The kind of the refusal.
    pub kind: RefusalKind,
    /// The server's reason.
    pub reason: String,
}

/// The kind of a [`Refusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalKind {
    /// The file does not exist.
    NotFound,
    /// The file has changed since it was opened.
    Changed,
    /// The server could not read the file.
    Failed,
}

impl RefusalKind {
    const ALL: [Self; 3] = [Self::NotFound, Self::Changed, Self::Failed];
}

/// A file in the answer to [`RangeClient::list`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListedFile {
    /// The name to open the file with.
    pub name: String,
    /// The length in bytes.
    pub len: u64,
}

/// The source of the files that a [`RangeHandler`] serves.
pub trait Files {
    /// Opens the file with this name. The name comes from the client and can be any text.
    ///
    /// # Errors
    /// Returns the refusal to send to the client.
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal>;

    /// Reads `len` bytes at `offset` of an open file, whose [`RemoteFile::id`] is `file`. The
    /// result is shorter only at the end of the file. If there is no memory for the result now,
    /// returns `None`, and the handler tries again later.
    ///
    /// # Errors
    /// Returns the refusal to send to the client.
    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal>;

    /// Lists the file with this name, or all files below the directory with this name. The files
    /// are sorted by name.
    ///
    /// # Errors
    /// Returns the refusal to send to the client. The default implementation refuses with
    /// [`RefusalKind::NotFound`].
    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        Err(Refusal {
            kind: RefusalKind::NotFound,
            reason: format!("cannot list {name:?}: this server lists no files"),
        })
    }

    /// Records that the client will serve the file `name` at `address` while it receives the file.
    /// Returns the address of another client to read from, or `None` if the client should read from
    /// this server. `lost` is an address that was returned before and is unreachable.
    /// The default implementation returns `None`.
    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        let _ = (name, address, lost);
        None
    }
}

/// Serves ranges of files on one connection of [`serve`](crate::serve()).
#[derive(Debug)]
pub struct RangeHandler<F> {
    files: F,
    stream: Option<u32>,
    /// The file, offset and length of a read for which there was no memory.
    waiting: Option<(u64, u64, usize)>,
}

/// Requests wait while at least this many bytes of answers are queued.
const MAX_QUEUED: usize = 8 << 20;

impl<F: Files> RangeHandler<F> {
    /// Creates a handler that serves `files` on one connection.
    pub fn new(files: F) -> Self {
        Self { files, stream: None, waiting: None }
    }

    fn answer(
        &mut self,
        message: &[u8],
        connection: &mut Connection<Vec<u8>>,
    ) -> Result<(), Error> {
        let request = Request::decode(message)?;
        match request {
            Request::Open { name } => {
                let mut fields = FieldWriter::default();
                match self.files.open(&name) {
                    Ok(file) => fields
                        .number(FILE, file.id)
                        .number(LEN, file.len)
                        .field(VERSION, &file.version),
                    Err(refusal) => refuse(&mut fields, &refusal),
                };
                self.reply(connection, fields)
            }
            Request::Read { file, offset, len } => self.read(file, offset, len, connection),
            Request::List { name, after } => {
                let mut fields = FieldWriter::default();
                match self.files.list(&name) {
                    Ok(files) => {
                        let mut left = PAGE_LEN;
                        for file in files
                            .iter()
                            .filter(|file| after.as_ref().is_none_or(|after| file.name > *after))
                        {
                            let entry =
                                [&file.len.to_le_bytes()[..], file.name.as_bytes()].concat();
                            let Some(rest) = left.checked_sub(entry.len()) else { break };
                            left = rest;
                            fields.field(ENTRY, &entry);
                        }
                    }
                    Err(refusal) => {
                        refuse(&mut fields, &refusal);
                    }
                }
                self.reply(connection, fields)
            }
            Request::Join { name, address, lost } => {
                let mut fields = FieldWriter::default();
                if let Some(from) = self.files.join(&name, &address, lost.as_deref()) {
                    fields.field(ADDRESS, from.as_bytes());
                }
                self.reply(connection, fields)
            }
        }
    }

    fn read(
        &mut self,
        file: u64,
        offset: u64,
        len: usize,
        connection: &mut Connection<Vec<u8>>,
    ) -> Result<(), Error> {
        match self.files.read(file, offset, len) {
            Ok(Some(bytes)) => {
                let info = TensorInfo::new("", Dtype::U8, [bytes.len() as u64])?;
                let stream = self.stream(connection)?;
                connection.send(stream, info, bytes, SendOptions::default())
            }
            Ok(None) => {
                self.waiting = Some((file, offset, len));
                Ok(())
            }
            Err(refusal) => {
                let mut fields = FieldWriter::default();
                refuse(&mut fields, &refusal);
                self.reply(connection, fields)
            }
        }
    }

    fn reply(
        &mut self,
        connection: &mut Connection<Vec<u8>>,
        fields: FieldWriter,
    ) -> Result<(), Error> {
        let stream = self.stream(connection)?;
        connection.send_message(stream, fields.finish().into())
    }

    fn stream(&mut self, connection: &mut Connection<Vec<u8>>) -> Result<u32, Error> {
        match self.stream {
            Some(stream) => Ok(stream),
            None => Ok(*self.stream.insert(connection.open_stream()?)),
        }
    }
}

fn refuse<'a>(fields: &'a mut FieldWriter, refusal: &Refusal) -> &'a mut FieldWriter {
    let reason = &refusal.reason.as_bytes()[..refusal.reason.len().min(4096)];
    fields.number(REFUSED, refusal.kind as u64).field(REASON, reason)
}

impl<F: Files> Handler for RangeHandler<F> {
    type Sink = Vec<u8>;

    fn handle(
        &mut self,
        event: Event<Vec<u8>>,
        connection: &mut Connection<Vec<u8>>,
    ) -> Result<(), String> {
        match event {
            Event::Connected { service, .. } if service != RANGES => {
                Err(format!("unknown service {service:?}: this server offers {RANGES:?}"))
            }
            Event::Message { bytes, .. } => {
                self.answer(&bytes, connection).map_err(|error| error.to_string())
            }
            Event::Metadata { .. } => {
                Err("unexpected tensor: this server only answers requests".into())
            }
            _ => Ok(()),
        }
    }

    fn is_ready(&mut self, connection: &mut Connection<Vec<u8>>) -> bool {
        if let Some((file, offset, len)) = self.waiting.take()
            && let Err(error) = self.read(file, offset, len, connection)
        {
            connection.close(&error.to_string());
        }
        self.waiting.is_none() && connection.unsent_bytes() < MAX_QUEUED
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Request {
    Open { name: String },
    Read { file: u64, offset: u64, len: usize },
    List { name: String, after: Option<String> },
    Join { name: String, address: String, lost: Option<String> },
}

impl Request {
    fn encode(&self) -> Bytes {
        let mut fields = FieldWriter::default();
        match self {
            Self::Open { name } => fields.number(OPERATION, OPEN).field(NAME, name.as_bytes()),
            Self::Read { file, offset, len } => {
                fields.number(OPERATION, READ).number(FILE, *file).number(OFFSET, *offset);
                fields.number(LEN, *len as u64)
            }
            Self::List { name, after } => {
                fields.number(OPERATION, LIST).field(NAME, name.as_bytes());
                if let Some(after) = after {
                    fields.field(AFTER_OR_LOST, after.as_bytes());
                }
                &mut fields
            }
            Self::Join { name, address, lost } => {
                fields.number(OPERATION, JOIN).field(NAME, name.as_bytes());
                fields.field(ADDRESS, address.as_bytes());
                if let Some(lost) = lost {
                    fields.field(AFTER_OR_LOST, lost.as_bytes());
                }
                &mut fields
            }
        };
        fields.finish().into()
    }

    fn decode(message: &[u8]) -> Result<Self, Error> {
        let (mut operation, mut name, mut file, mut offset, mut len) = (0, None, None, None, None);
        let (mut address, mut lost) = (None, None);
        let mut fields = FieldReader::new(message, 0);
        while let Some(field) = fields.next()? {
            match field.tag {
                OPERATION => operation = field.number()?,
                NAME => name = Some(field.text()?.to_string()),
                FILE => file = Some(field.number()?),
                OFFSET => offset = Some(field.number()?),
                LEN => len = Some(field.number()?),
                ADDRESS => address = Some(field.text()?.to_string()),
                AFTER_OR_LOST => lost = Some(field.text()?.to_string()),
                _ => field.skip()?,
            }
        }
        match (operation, name, file, offset, len) {
            (OPEN, Some(name), ..) => Ok(Self::Open { name }),
            (LIST, Some(name), ..) => Ok(Self::List { name, after: lost }),
            (JOIN, Some(name), ..) if address.is_some() => {
                Ok(Self::Join { name, address: address.unwrap_or_default(), lost })
            }
            (READ, _, Some(file), Some(offset), Some(len)) if (1..=MAX_RANGE).contains(&len) => {
                Ok(Self::Read { file, offset, len: len as usize })
            }
            _ => {
                let what = match operation {
                    OPEN | LIST => "invalid request: open and list need a name".into(),
                    JOIN => "invalid request: join needs a name and an address".into(),
                    READ => format!(
                        "invalid request: read needs a file, an offset, and a length of 1 to \
                         {MAX_RANGE} bytes"
                    ),
                    _ => format!("invalid request: unknown operation {operation}"),
                };
                Err(Error::Protocol { stream: 0, what })
            }
        }
    }
}

/// Reads ranges of a server's files, one after the other. All methods except
/// [`take_sink`](Self::take_sink) block.
///
/// ```
/// use std::thread;
/// use ts_remote::{
///     Bytes, ConnectionOptions, Files, Listener, RangeClient, RangeHandler, Refusal, RefusalKind,
///     RemoteFile, ServerOptions, Socket, serve,
/// };
///
/// /// One file in memory.
/// struct OneFile(Bytes);
///
/// impl Files for OneFile {
///     fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal> {
///         if name == "model.bin" {
///             Ok(RemoteFile { id: 0, len: self.0.len() as u64, version: vec![1] })
///         } else {
///             Err(Refusal { kind: RefusalKind::NotFound, reason: "no such file".into() })
///         }
///     }
///
///     fn read(&mut self, _: u64, at: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
///         Ok(Some(self.0.slice(at as usize..).slice(..len)))
///     }
/// }
///
/// let options = ConnectionOptions::default();
/// let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
/// let socket = Socket::connect(listener.address(), options.idle_timeout)?;
/// let (stop, stopped) = std::sync::mpsc::channel();
/// let server = thread::spawn(move || {
///     let file = Bytes::from_static(b"0123456789");
///     let mut should_stop = |_: &_| stopped.try_recv().is_ok();
///     let new_handler = |_: &str| RangeHandler::new(OneFile(file.clone()));
///     serve(&listener, &ServerOptions::default(), &mut should_stop, new_handler, |_, _| {})
/// });
///
/// let mut client = RangeClient::<Vec<u8>>::new(socket, options)?;
/// let file = client.open("model.bin")?.expect("the file exists");
/// let mut memory = Some(vec![0; 4]);
/// client.read(file.id, 3, &mut memory)?.expect("the range is in the file");
/// assert_eq!(memory, Some(b"3456".to_vec()));
/// assert_eq!(client.open("other")?.unwrap_err().kind, RefusalKind::NotFound);
/// drop(client);
/// stop.send(()).expect("the server runs");
/// server.join().expect("the server does not panic")?;
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct RangeClient<S> {
    link: Link<S>,
    stream: u32,
}

impl<S: Sink> RangeClient<S> {
    /// Completes the handshake with a server of the service [`RANGES`].
    ///
    /// # Errors
    /// Returns the same errors as [`Link::new`]. Returns [`Error::Misuse`] if the server allows no
    /// streams.
    pub fn new(socket: Socket, options: ConnectionOptions) -> Result<Self, Error> {
        let mut link = Link::new(socket, Role::Connector, options.with_service(RANGES))?;
        let stream = link.connection().open_stream()?;
        Ok(Self { link, stream })
    }

    /// Opens the server's file with this name. Its ranges can then be [read](Self::read).
    ///
    /// # Errors
    /// Returns an error if the connection fails or the answer is invalid. The inner result contains
    /// the server's refusal.
    pub fn open(&mut self, name: &str) -> Result<Result<RemoteFile, Refusal>, Error> {
        let message = self.request(&Request::Open { name: name.into() })?;
        let (mut id, mut len, mut version) = (None, None, None);
        if let Some(refusal) = refusal_of(&message)? {
            return Ok(Err(refusal));
        }
        let mut fields = FieldReader::new(&message, 0);
        while let Some(field) = fields.next()? {
            match field.tag {
                FILE => id = Some(field.number()?),
                LEN => len = Some(field.number()?),
                VERSION => version = Some(field.bytes().to_vec()),
                _ => field.skip()?,
            }
        }
        match (id, len, version) {
            (Some(id), Some(len), Some(version)) => Ok(Ok(RemoteFile { id, len, version })),
            _ => Err(Error::Protocol {
                stream: 0,
                what: format!(
                    "received an incomplete answer to open {name:?} (expected a file, a length and \
                     a version)"
                ),
            }),
        }
    }

    /// Reads bytes of the file whose [`RemoteFile::id`] is `file`, from `offset`, into `memory`.
    /// The length of `memory` is the length of the range: at least 1 byte, and at most
    /// [`MAX_RANGE`]. The range must be inside the file. Unless this returns an outer error,
    /// `memory` is `Some` afterwards. If the connection ends during the read,
    /// [`take_sink`](Self::take_sink) returns the memory.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the answer is invalid. The inner result contains
    /// the server's refusal.
    ///
    /// # Panics
    /// Panics if `memory` is `None`.
    pub fn read(
        &mut self,
        file: u64,
        offset: u64,
        memory: &mut Option<S>,
    ) -> Result<Result<(), Refusal>, Error> {
        let len = memory.as_ref().expect("`memory` is `Some` when `read` is called").byte_len();
        let request = Request::Read { file, offset, len: len as usize };
        self.link.send_message(self.stream, request.encode())?;
        loop {
            match self.answer()? {
                Event::Metadata { stream, info, known: false, .. }
                    if info.storage_len == len && memory.is_some() =>
                {
                    if let Some(sink) = memory.take() {
                        self.link.connection().accept(stream, sink)?;
                    }
                }
                Event::End { sink: Some(sink), .. } => {
                    *memory = Some(sink);
                    return Ok(Ok(()));
                }
                Event::Data { .. } | Event::Connected { .. } => {}
                Event::Message { bytes, .. } => match refusal_of(&bytes)? {
                    Some(refusal) => return Ok(Err(refusal)),
                    None => {
                        let what = "received a message instead of the tensor that answers read";
                        return Err(Error::Protocol { stream: 0, what: what.into() });
                    }
                },
                Event::Cancelled { reason, sink, .. } => {
                    *memory = sink.or(memory.take());
                    return Err(cancelled(&reason));
                }
                Event::Metadata { info, .. } => {
                    let what = format!(
                        "received an unexpected tensor of {} bytes (expected one tensor for this \
                         read, with a payload of {len} bytes)",
                        info.storage_len
                    );
                    return Err(Error::Protocol { stream: 0, what });
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Lists the file with this name, or all files below the directory with this name. The files
    /// are sorted by name.
    ///
    /// # Errors
    /// Returns the same errors as [`open`](Self::open).
    pub fn list(&mut self, name: &str) -> Result<Result<Vec<ListedFile>, Refusal>, Error> {
        let mut files: Vec<ListedFile> = Vec::new();
        loop {
            let after = files.last().map(|file| file.name.clone());
            let message = self.request(&Request::List { name: name.into(), after })?;
            if let Some(refusal) = refusal_of(&message)? {
                return Ok(Err(refusal));
            }
            let before = files.len();
            let mut fields = FieldReader::new(&message, 0);
            while let Some(field) = fields.next()? {
                if field.tag != ENTRY {
                    field.skip()?;
                    continue;
                }
                let bad = |what: String| Error::Protocol { stream: 0, what };
                let cut = || bad("received a list with a truncated entry".into());
                let (len, name) = field.bytes().split_first_chunk::<8>().ok_or_else(cut)?;
                let not_text = |_| bad("received a list with a name that is not UTF-8".into());
                let name = std::str::from_utf8(name).map_err(not_text)?.to_string();
                // Without these checks, a server could send names for ever.
                if let Some(last) = files.last().filter(|last| last.name >= name) {
                    let last = &last.name;
                    return Err(bad(format!("received an unsorted list: {name:?} after {last:?}")));
                }
                if files.len() >= MAX_LISTED {
                    return Err(bad(format!("received a list of more than {MAX_LISTED} files")));
                }
                files.push(ListedFile { name, len: u64::from_le_bytes(*len) });
            }
            if files.len() == before {
                return Ok(Ok(files));
            }
        }
    }

    /// Announces that this client will serve the file `name` at `address` while it receives the
    /// file. Returns the address of another client to read from, or `None` if this client should
    /// read from the server. `lost` is an address that was returned before and is unreachable.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the answer is invalid.
    pub fn join(
        &mut self,
        name: &str,
        address: &str,
        lost: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let lost = lost.map(Into::into);
        let message =
            self.request(&Request::Join { name: name.into(), address: address.into(), lost })?;
        let (mut fields, mut from) = (FieldReader::new(&message, 0), None);
        while let Some(field) = fields.next()? {
            match field.tag {
                ADDRESS => from = Some(field.text()?.to_string()),
                _ => field.skip()?,
            }
        }
        Ok(from)
    }

    /// Sends a request and returns the message that answers it.
    fn request(&mut self, request: &Request) -> Result<Bytes, Error> {
        self.link.send_message(self.stream, request.encode())?;
        loop {
            match self.answer()? {
                Event::Message { bytes, .. } => return Ok(bytes),
                Event::Connected { .. } => {}
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Waits for the next event of an answer. The server may wait for memory before it answers, so
    /// an answer may take as long as the stall timeout.
    fn answer(&mut self) -> Result<Event<S>, Error> {
        let stall_timeout = self.link.stall_timeout();
        let stalled = Error::Stalled { peer: self.link.peer().into(), after: stall_timeout };
        self.link.next_event_within(stall_timeout)?.ok_or(stalled)
    }

    /// Takes the memory of an incomplete read, after the connection has ended. Returns `None` if no
    /// read was incomplete.
    pub fn take_sink(&mut self) -> Option<S> {
        self.link.connection().take_sinks().pop()
    }
}

fn refusal_of(message: &[u8]) -> Result<Option<Refusal>, Error> {
    let (mut kind, mut reason) = (None, String::new());
    let mut fields = FieldReader::new(message, 0);
    while let Some(field) = fields.next()? {
        match field.tag {
            REFUSED => {
                let known = RefusalKind::ALL.get(field.number()? as usize).copied();
                kind = known.or(Some(RefusalKind::Failed));
            }
            REASON => reason = String::from_utf8_lossy(field.bytes()).into_owned(),
            _ => {}
        }
    }
    Ok(kind.map(|kind| Refusal { kind, reason }))
}

fn unexpected<S>(event: &Event<S>) -> Error {
    let what = match event {
        Event::Metadata { info, .. } => {
            format!("received an unexpected tensor of {} bytes", info.storage_len)
        }
        Event::Cancelled { reason, .. } => return cancelled(reason),
        _ => "the server ended the stream of answers".into(),
    };
    Error::Protocol { stream: 0, what }
}

fn cancelled(reason: &str) -> Error {
    Error::Protocol { stream: 0, what: format!("the server cancelled the answer: {reason}") }
}
