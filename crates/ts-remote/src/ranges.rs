// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges of files that are elsewhere: the service `ranges`, by which checkpoints are read from
//! another machine.

use bytes::Bytes;
use ts_format::Dtype;

use crate::wire::{FieldWriter, Fields};
use crate::{
    Connection, ConnectionOptions, Error, Event, Handler, Link, Role, SendOptions, Sink, Socket,
    TensorInfo,
};

/// What a connection to such a server asks for.
pub const RANGES: &str = "ranges";
/// The longest range that is asked for at once, in bytes.
pub const MAX_RANGE: u64 = 16 << 20;

/// The most files that are listed.
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
const LOST: u8 = 0x8b;

/// The most bytes of names in one answer; the rest is asked for again.
const PAGE: usize = 32 << 10;

/// A file of a server's, as it was when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// The server's number for it, on this connection.
    pub id: u64,
    /// Its length in bytes.
    pub len: u64,
    /// What tells this state of it from others.
    pub version: Vec<u8>,
}

/// Why a server does not give what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// What kind of reason it is.
    pub kind: RefusalKind,
    /// In the server's words.
    pub reason: String,
}

/// Kinds of reasons to refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalKind {
    /// There is no such file.
    NotFound,
    /// The file is not what it was when it was opened.
    Changed,
    /// The server could not read it.
    Failed,
}

impl RefusalKind {
    const ALL: [Self; 3] = [Self::NotFound, Self::Changed, Self::Failed];
}

/// A file that a server has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListedFile {
    /// The name by which it is opened.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
}

/// Files to serve ranges of.
pub trait Files {
    /// Opens a file by the name that clients give it, which may be anything.
    ///
    /// # Errors
    /// Why not.
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal>;

    /// A range of a file that was opened; fewer bytes only at its end. `Ok(None)` when there is no
    /// memory for it now.
    ///
    /// # Errors
    /// Why not.
    fn read(&mut self, file: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal>;

    /// The file of this name, or all files below the directory of this name, in the order of their
    /// names.
    ///
    /// # Errors
    /// Why not; [`RefusalKind::NotFound`] if nothing is said about it.
    fn list(&mut self, name: &str) -> Result<Vec<ListedFile>, Refusal> {
        Err(Refusal {
            kind: RefusalKind::NotFound,
            reason: format!("nothing is listed as {name:?}"),
        })
    }

    /// A client will have what is of this name, and serve it at `address` as it comes: who else
    /// does, from whom it is to be had meanwhile. `lost` is one who was named before and is gone.
    /// `None` for none but this server.
    fn join(&mut self, name: &str, address: &str, lost: Option<&str>) -> Option<String> {
        let _ = (name, address, lost);
        None
    }
}

/// Serves ranges of files to one that has connected.
#[derive(Debug)]
pub struct RangeHandler<F> {
    files: F,
    stream: Option<u32>,
    /// What could not be read for want of memory.
    waiting: Option<(u64, u64, usize)>,
}

/// What is given to the socket ahead of what it takes, in bytes.
const AHEAD: usize = 8 << 20;

impl<F: Files> RangeHandler<F> {
    /// One that has served nothing yet.
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
                        let mut left = PAGE;
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
                Err(format!("this server serves `{RANGES}`, and not `{service}`"))
            }
            Event::Message { bytes, .. } => {
                self.answer(&bytes, connection).map_err(|error| error.to_string())
            }
            Event::Metadata { .. } => Err("this server takes no tensors".into()),
            _ => Ok(()),
        }
    }

    fn is_ready(&mut self, connection: &mut Connection<Vec<u8>>) -> bool {
        if let Some((file, offset, len)) = self.waiting.take()
            && let Err(error) = self.read(file, offset, len, connection)
        {
            connection.close(&error.to_string());
        }
        self.waiting.is_none() && connection.unsent_bytes() < AHEAD
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
                    fields.field(LOST, after.as_bytes());
                }
                &mut fields
            }
            Self::Join { name, address, lost } => {
                fields.number(OPERATION, JOIN).field(NAME, name.as_bytes());
                fields.field(ADDRESS, address.as_bytes());
                if let Some(lost) = lost {
                    fields.field(LOST, lost.as_bytes());
                }
                &mut fields
            }
        };
        fields.finish().into()
    }

    fn decode(message: &[u8]) -> Result<Self, Error> {
        let bad = |what: &str| Error::Protocol { stream: 0, what: what.into() };
        let (mut operation, mut name, mut file, mut offset, mut len) = (0, None, None, None, None);
        let (mut address, mut lost) = (None, None);
        let mut fields = Fields::new(message, 0);
        while let Some(field) = fields.next()? {
            match field.tag {
                OPERATION => operation = field.number()?,
                NAME => name = Some(field.text()?.to_string()),
                FILE => file = Some(field.number()?),
                OFFSET => offset = Some(field.number()?),
                LEN => len = Some(field.number()?),
                ADDRESS => address = Some(field.text()?.to_string()),
                LOST => lost = Some(field.text()?.to_string()),
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
            _ => Err(bad("it asks for nothing that there is")),
        }
    }
}

/// Reads ranges of a server's files, one after the other. Blocks.
#[derive(Debug)]
pub struct RangeClient<S> {
    link: Link<S>,
    stream: u32,
}

impl<S: Sink> RangeClient<S> {
    /// Asks a server for its service.
    ///
    /// # Errors
    /// As [`Link::new`].
    pub fn new(socket: Socket, options: ConnectionOptions) -> Result<Self, Error> {
        let options = ConnectionOptions { service: RANGES.into(), ..options };
        let mut link = Link::new(socket, Role::Connector, options)?;
        let stream = link.connection().open_stream()?;
        Ok(Self { link, stream })
    }

    /// Opens a file.
    ///
    /// # Errors
    /// What ended the connection, or inside of it why the server refuses.
    pub fn open(&mut self, name: &str) -> Result<Result<RemoteFile, Refusal>, Error> {
        let message = self.ask(&Request::Open { name: name.into() })?;
        let (mut id, mut len, mut version) = (None, None, None);
        if let Some(refusal) = refusal_of(&message)? {
            return Ok(Err(refusal));
        }
        let mut fields = Fields::new(&message, 0);
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
            _ => Err(Error::Protocol { stream: 0, what: "a file without a length".into() }),
        }
    }

    /// Reads a range, at most [`MAX_RANGE`], to memory of exactly its length, which must all be in
    /// the file. The memory is there again afterwards, unless the connection ended meanwhile: then
    /// [`take_sink`](Self::take_sink) has it.
    ///
    /// # Errors
    /// What ended the connection; inside of that why the server refuses.
    ///
    /// # Panics
    /// If no memory is given.
    pub fn read(
        &mut self,
        file: u64,
        offset: u64,
        memory: &mut Option<S>,
    ) -> Result<Result<(), Refusal>, Error> {
        let len = memory.as_ref().expect("memory is given").byte_len();
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
                        return Err(Error::Protocol {
                            stream: 0,
                            what: "an answer to no question".into(),
                        });
                    }
                },
                Event::Cancelled { reason, sink, .. } => {
                    *memory = sink.or(memory.take());
                    return Err(Error::Protocol {
                        stream: 0,
                        what: format!("it gives up: {reason}"),
                    });
                }
                other => return Err(surprise(&other)),
            }
        }
    }

    /// The file of this name, or all files below the directory of this name, in the order of their
    /// names.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn list(&mut self, name: &str) -> Result<Result<Vec<ListedFile>, Refusal>, Error> {
        let mut files: Vec<ListedFile> = Vec::new();
        loop {
            let after = files.last().map(|file| file.name.clone());
            let message = self.ask(&Request::List { name: name.into(), after })?;
            if let Some(refusal) = refusal_of(&message)? {
                return Ok(Err(refusal));
            }
            let before = files.len();
            let mut fields = Fields::new(&message, 0);
            while let Some(field) = fields.next()? {
                if field.tag != ENTRY {
                    field.skip()?;
                    continue;
                }
                let bad =
                    || Error::Protocol { stream: 0, what: "a file that is listed wrongly".into() };
                let (len, name) = field.bytes().split_first_chunk::<8>().ok_or_else(bad)?;
                let name = std::str::from_utf8(name).map_err(|_| bad())?.to_string();
                // Otherwise it could go on for ever.
                if files.last().is_some_and(|last| last.name >= name) || files.len() >= MAX_LISTED {
                    return Err(bad());
                }
                files.push(ListedFile { name, len: u64::from_le_bytes(*len) });
            }
            if files.len() == before {
                return Ok(Ok(files));
            }
        }
    }

    /// Says that this end will have what is of this name, and serve it at `address`: the address of
    /// one who has it already, or is about to, and from whom it is to be read; `None` for the
    /// server itself. `lost` is one who was named before and is gone.
    ///
    /// # Errors
    /// What ended the connection.
    pub fn join(
        &mut self,
        name: &str,
        address: &str,
        lost: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let lost = lost.map(Into::into);
        let message =
            self.ask(&Request::Join { name: name.into(), address: address.into(), lost })?;
        let (mut fields, mut from) = (Fields::new(&message, 0), None);
        while let Some(field) = fields.next()? {
            match field.tag {
                ADDRESS => from = Some(field.text()?.to_string()),
                _ => field.skip()?,
            }
        }
        Ok(from)
    }

    fn ask(&mut self, request: &Request) -> Result<Bytes, Error> {
        self.link.send_message(self.stream, request.encode())?;
        loop {
            match self.answer()? {
                Event::Message { bytes, .. } => return Ok(bytes),
                Event::Connected { .. } => {}
                other => return Err(surprise(&other)),
            }
        }
    }

    /// What the server says next, which may look for memory first, but not for ever.
    fn answer(&mut self) -> Result<Event<S>, Error> {
        let stall_timeout = self.link.stall_timeout();
        let stalled = Error::Stalled { peer: self.link.peer().into(), after: stall_timeout };
        self.link.next_event_within(stall_timeout)?.ok_or(stalled)
    }

    /// The memory of a range that was not read to its end, when the connection has ended.
    pub fn take_sink(&mut self) -> Option<S> {
        self.link.connection().take_sinks().pop()
    }
}

fn refusal_of(message: &[u8]) -> Result<Option<Refusal>, Error> {
    let (mut kind, mut reason) = (None, String::new());
    let mut fields = Fields::new(message, 0);
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

fn surprise<S>(event: &Event<S>) -> Error {
    let what = match event {
        Event::Metadata { info, .. } => {
            format!("{} bytes that were not asked for", info.storage_len)
        }
        Event::Cancelled { reason, .. } => format!("it gives up: {reason}"),
        _ => "it ends the stream of its answers".into(),
    };
    Error::Protocol { stream: 0, what }
}
