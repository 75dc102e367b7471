// Read the address, shape, strides and dtype of every tensor of a Python tuple in one call.
//
// Newer versions of PyTorch export these attributes through the C exchange API of DLPack. This file includes neither
// Python.h nor PyTorch headers, so that one library supports every version of Python and PyTorch. It only calls a few
// functions of Python's stable ABI, whose addresses `tensor_reader.py` passes in. The caller must hold the GIL.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

namespace {

// The structures of dlpack.h, version 1. Their layout is fixed within a major version.
struct Version {
  uint32_t major, minor;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  int32_t device_type, device_id, ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ExchangeAPI {
  Version version;
  const ExchangeAPI* previous;  // an older version of the API
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
};
static_assert(sizeof(void*) != 8 || (sizeof(DLTensor) == 48 && sizeof(ExchangeAPI) == 56));

constexpr uint32_t DLPACK_MAJOR = 1;
constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2, BFLOAT = 4;

// Objects and functions of Python, in the order of `tensor_reader.py`.
struct Python {
  void* (*tuple_get_item)(void* tuple, ptrdiff_t index);  // a borrowed reference
  ptrdiff_t (*tuple_size)(void* tuple);
  void* (*object_type)(void* object);  // a new reference
  void (*decref)(void* object);
  void* (*bytes_from)(const char* data, ptrdiff_t size);
  void (*clear_error)();
  void* (*is_neg)(void* tensor, void* unused);  // the method of Tensor: a new reference, or null
  const void* false_object;
  const void* tensor_type;
  const void* parameter_type;
  const ExchangeAPI* exchange;
};

// The dtypes of native.cpp, and a number for all others.
enum Kind { F32, F64, BF16, F16, OTHER };

constexpr int64_t EMPTY_ADDRESS = 64;  // of a tensor without entries, which is never read
constexpr size_t HEADER = 3, COLUMNS = 6;

Kind kind_of(DataType dtype) {
  if (dtype.lanes != 1) return OTHER;
  if (dtype.code == BFLOAT) return dtype.bits == 16 ? BF16 : OTHER;
  if (dtype.code != FLOAT) return OTHER;
  return dtype.bits == 32 ? F32 : dtype.bits == 64 ? F64 : dtype.bits == 16 ? F16 : OTHER;
}

// The number of entries of a tensor, the distance in memory from the first to the end of the last entry (in entries),
// and whether the tensor is contiguous.
struct Extent {
  int64_t size = 1, reach = 1;
  bool contiguous = true;
};

Extent extent_of(const DLTensor& tensor) {
  Extent found;
  for (int32_t d = tensor.ndim - 1; d >= 0; --d) {
    const int64_t n = tensor.shape[d];
    if (n == 0) return {0, 0, true};
    if (n == 1) continue;
    if (tensor.strides[d] != found.size) found.contiguous = false;
    found.reach += (n - 1) * tensor.strides[d];
    found.size *= n;
  }
  return found;
}

// A subclass of Tensor may change the meaning of an attribute, so its tensors are not read.
bool has_plain_type(const Python& python, void* object) {
  void* type = python.object_type(object);
  python.decref(type);
  return type == python.tensor_type || type == python.parameter_type;
}

// Return whether a tensor is not a negative view, whose memory contains the negatives of its entries. DLPack does not
// report this.
bool has_plain_sign(const Python& python, void* object) {
  void* answer = python.is_neg(object, nullptr);
  if (answer == nullptr) {
    python.clear_error();
    return false;
  }
  python.decref(answer);
  return answer == python.false_object;
}

// Fill in the table. Return false if a tensor is not in plain CPU memory.
bool fill(const Python& python, void* tuple, size_t n, std::vector<int64_t>& table) {
  int64_t contiguous = 1, kinds = 0, total = 0;
  for (size_t i = 0; i < n; ++i) {
    void* object = python.tuple_get_item(tuple, ptrdiff_t(i));
    DLTensor tensor;
    if (!has_plain_type(python, object)) return false;
    if (python.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
      python.clear_error();  // The caller reads these tensors in Python.
      return false;
    }
    if (tensor.device_type != CPU || !has_plain_sign(python, object)) return false;
    const Extent extent = extent_of(tensor);
    // A lazily allocated zero tensor and one whose storage was freed have entries, but a null data pointer.
    if (extent.size > 0 && tensor.data == nullptr) return false;
    if (__builtin_add_overflow(total, extent.size, &total)) return false;
    const Kind kind = kind_of(tensor.dtype);
    const int64_t address = tensor.data == nullptr ? 0 : int64_t(tensor.data) + int64_t(tensor.byte_offset);
    const int64_t itemsize = (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
    contiguous &= extent.contiguous;
    kinds |= 1 << kind;
    int64_t* column = table.data() + HEADER + i;
    column[0] = extent.size;
    column[n] = address;
    column[2 * n] = address + extent.reach * itemsize;
    int64_t* descriptor = table.data() + HEADER + 3 * n + 3 * i;
    descriptor[0] = address == 0 ? EMPTY_ADDRESS : address;
    descriptor[1] = 1;
    descriptor[2] = kind;
    const DataType dtype = tensor.dtype;
    table.push_back(int64_t(dtype.code) | int64_t(dtype.bits) << 8 | int64_t(dtype.lanes) << 16 | int64_t(tensor.ndim) << 32);
    table.insert(table.end(), tensor.shape, tensor.shape + tensor.ndim);
  }
  table[0] = contiguous;
  table[1] = kinds;
  table[2] = total;
  return true;
}

}  // namespace

// Return the API of the version that this file supports, or null.
extern "C" const void* manifoldagg_find_exchange_api(const void* newest) {
  auto api = static_cast<const ExchangeAPI*>(newest);
  while (api != nullptr && api->version.major != DLPACK_MAJOR) api = api->previous;
  return api == nullptr || api->dltensor_from_py_object_no_sync == nullptr ? nullptr : api;
}

// Return a table of 64-bit integers as a bytes object. It is empty if these tensors must be read in Python. The table
// contains:
// - three numbers: whether all tensors are contiguous, a bit mask of the dtypes, and the total number of entries;
// - the number of entries, the start address and the end address of each tensor: three arrays of length n;
// - the descriptor of each tensor for native.cpp: address, stride, dtype;
// - for each tensor, one number for dtype and number of dimensions, then its shape.
extern "C" void* manifoldagg_read_tensors(const Python* python, void* tuple) {
  const ptrdiff_t n = python->tuple_size(tuple);
  try {
    std::vector<int64_t> table;
    if (n > 0) {
      table.reserve(HEADER + size_t(n) * (COLUMNS + 4));
      table.resize(HEADER + size_t(n) * COLUMNS);
      if (!fill(*python, tuple, size_t(n), table)) table.clear();
    }
    return python->bytes_from(reinterpret_cast<const char*>(table.data()), ptrdiff_t(8 * table.size()));
  } catch (const std::exception&) {  // no memory for the table
    return python->bytes_from("", 0);
  }
}
