// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes how PyTorch creates objects of its native classes.
//!
//! `torch.device(0)` means the device `ts:0` once `ts` is registered, and PyTorch cannot create a
//! `torch.Generator` for it. Neither has a setting or a hook, and classes in their place would not
//! be those that PyTorch itself knows. So the function that creates objects is replaced in the
//! class.

use std::ffi::c_void;
use std::ptr;

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// A class whose objects Python code creates first.
struct Replaced {
    class: usize,
    /// The function that created objects before.
    new: ffi::newfunc,
    create: Py<PyAny>,
    only_numbers: bool,
}

static REPLACED: Mutex<Vec<Replaced>> = Mutex::new(Vec::new());

/// The size of the part of a class that contains this slot, in words, in each version of Python.
const WORDS: usize = 50;

/// Makes `class(*args, **kwargs)` call `create(args, kwargs)`, which returns the object, or
/// `NotImplemented` to create it as before. Lasts until the process ends. With `only_numbers`, only
/// calls with a single argument that is an `int` do so.
///
/// # Errors
/// RuntimeError if the class has another layout than known versions of Python give it.
#[pyfunction]
pub(crate) fn remote_create_with(
    class_: &Bound<'_, PyType>,
    create: Py<PyAny>,
    only_numbers: bool,
) -> PyResult<()> {
    let object = class_.as_type_ptr();
    // SAFETY: a class is an object that lives as long as the process, since PyTorch defines it. Its
    // first words are those of a `PyTypeObject`, which has more than `WORDS` of them.
    let (new, slots) = unsafe {
        let new = ffi::PyType_GetSlot(object, ffi::Py_tp_new);
        (new, std::slice::from_raw_parts(object.cast::<*mut c_void>(), WORDS))
    };
    let mut found = slots.iter().enumerate().filter(|(_, slot)| **slot == new && !new.is_null());
    let (Some((index, _)), None) = (found.next(), found.next()) else {
        return Err(PyRuntimeError::new_err(format!(
            "cannot change how {class_} objects are created: this version of Python is unknown"
        )));
    };
    // SAFETY: the slot `Py_tp_new` contains a function of this type.
    let new = unsafe { std::mem::transmute::<*mut c_void, ffi::newfunc>(new) };
    REPLACED.lock().push(Replaced { class: object as usize, new, create, only_numbers });
    // SAFETY: this slot of the class contains the function that creates objects. The attached
    // interpreter lets no other thread use the class.
    unsafe {
        *object.cast::<*mut c_void>().add(index) = create_object as *mut c_void;
        ffi::PyType_Modified(object);
    }
    Ok(())
}

/// Returns whether the only argument is an `int`.
///
/// # Safety
/// `args` is a tuple, and `kwargs` a dictionary or null.
unsafe fn is_number(args: *mut ffi::PyObject, kwargs: *mut ffi::PyObject) -> bool {
    // SAFETY: the caller guarantees the types, and the tuple has the element.
    unsafe {
        kwargs.is_null()
            && ffi::PyTuple_Size(args) == 1
            && ffi::PyLong_CheckExact(ffi::PyTuple_GetItem(args, 0)) != 0
    }
}

/// Creates an object of a class in [`REPLACED`], or of a subclass of one.
unsafe extern "C" fn create_object(
    class: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: Python calls this function with an attached interpreter, and with valid objects.
    let py = unsafe { Python::assume_attached() };
    let known = REPLACED.lock().iter().find_map(|replaced| {
        // SAFETY: both are classes.
        let is_it = unsafe { ffi::PyType_IsSubtype(class, replaced.class as *mut _) } != 0;
        is_it.then(|| {
            // SAFETY: Python passes a tuple, and a dictionary or null.
            let asks = !replaced.only_numbers || unsafe { is_number(args, kwargs) };
            (replaced.new, asks.then(|| replaced.create.clone_ref(py)))
        })
    });
    let Some((new, create)) = known else {
        PyRuntimeError::new_err("the class was not changed").restore(py);
        return ptr::null_mut();
    };
    let Some(create) = create else {
        // SAFETY: the function gets what Python has passed.
        return unsafe { new(class, args, kwargs) };
    };
    // SAFETY: Python passes a tuple, and a dictionary or null.
    let given = unsafe {
        (Bound::from_borrowed_ptr(py, args), Bound::from_borrowed_ptr_or_opt(py, kwargs))
    };
    match create.bind(py).call1(given) {
        // SAFETY: the function gets what Python would have passed to it.
        Ok(made) if made.is(py.NotImplemented()) => unsafe { new(class, args, kwargs) },
        Ok(made) => made.into_ptr(),
        Err(error) => {
            error.restore(py);
            ptr::null_mut()
        }
    }
}
